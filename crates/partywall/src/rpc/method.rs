//! Names of methods.

/// A method of a server: the number that its name is hashed to (FNV-1a, 32 bits). A server refuses two names with one number.
///
/// ```
/// use partywall::rpc::Method;
///
/// const ADD: Method = Method::named("add");
/// assert_eq!(ADD, "add".into());
/// assert_ne!(ADD, Method::named("subtract"));
/// assert_eq!(Method::numbered(ADD.number()), ADD);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Method(u32);

impl Method {
    /// The method of this name.
    pub const fn named(name: &str) -> Self {
        let bytes = name.as_bytes();
        let mut hash = 0x811c_9dc5_u32;
        let mut i = 0;
        while i < bytes.len() {
            hash = (hash ^ bytes[i] as u32).wrapping_mul(0x0100_0193);
            i += 1;
        }
        Self(hash)
    }

    /// The method of this number.
    pub const fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// The number by which a record names the method.
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl From<&str> for Method {
    fn from(name: &str) -> Self {
        Self::named(name)
    }
}
