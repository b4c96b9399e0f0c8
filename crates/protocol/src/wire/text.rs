//! Fields that are longer than a name: the clauses of a policy, the addresses of a host.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;

use partywall_shm::address::{narrow, wide};

use super::WireError;
use super::codec::{Field, PacketReader, PacketWriter, Put, Take, put_text, take_text};

/// Text of up to [`MAX`](Self::MAX) bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(pub String);

/// A [`Text`] in a packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BorrowedText<'a>(pub &'a str);

impl Text {
    /// The most bytes that decoding takes. Encoding cuts what is longer to one more than that, so that it is refused and
    /// never mistaken for another text.
    pub const MAX: usize = 3072;
}

impl Put for BorrowedText<'_> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        put_text(self.0, Text::MAX + 4, out);
    }
}

impl<'a> Take<'a> for BorrowedText<'a> {
    const MIN: usize = 2;

    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let length = u16::take(reader)?;
        if usize::from(length) > Text::MAX {
            return Err(WireError::Value { field: "the length of a text", value: length.into() });
        }
        take_text(length, "a text", reader).map(Self)
    }
}

impl Put for Text {
    fn put(&self, out: &mut PacketWriter<'_>) {
        BorrowedText(&self.0).put(out);
    }
}

impl Field for Text {
    type Borrowed<'a> = BorrowedText<'a>;
    const MAX: usize = size_of::<u16>() + Self::MAX;
    fn own(borrowed: BorrowedText<'_>) -> Self {
        Self(borrowed.0.into())
    }
    #[cfg(test)]
    fn spell(name: &str, out: &mut String) {
        out.push_str(&alloc::format!("{name} text"));
    }
}

/// Some addresses: `count u16`, and 16 bytes each, most significant first, as IPv6 writes them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AddressList(pub Vec<IpAddr>);

/// [`AddressList`] as they lie in a packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BorrowedAddresses<'a>(&'a [[u8; 16]]);

impl AddressList {
    /// The most addresses; encoding leaves out what is beyond them.
    pub const MAX: usize = 64;
}

impl<'a> BorrowedAddresses<'a> {
    /// These addresses, each as [`bytes`](Self::bytes) makes it.
    pub fn new(list: &'a [[u8; 16]]) -> Self {
        Self(list)
    }

    /// One address as it is in a packet.
    pub fn bytes(ip: IpAddr) -> [u8; 16] {
        wide(ip).to_be_bytes()
    }

    /// Decodes the addresses one after the other.
    pub fn iter(self) -> impl Iterator<Item = IpAddr> + use<'a> {
        self.0.iter().map(|bytes| narrow(u128::from_be_bytes(*bytes)))
    }
}

impl Put for BorrowedAddresses<'_> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        let count = self.0.len().min(AddressList::MAX);
        // It is at most 64.
        (count as u16).put(out);
        out.bytes(self.0[..count].as_flattened());
    }
}

impl<'a> Take<'a> for BorrowedAddresses<'a> {
    const MIN: usize = 2;

    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let count = u16::take(reader)?;
        if usize::from(count) > AddressList::MAX {
            return Err(WireError::Value { field: "the number of addresses", value: count.into() });
        }
        let bytes = reader.bytes(usize::from(count) * 16, "a list of addresses")?;
        Ok(Self(bytes.as_chunks().0))
    }
}

impl Put for AddressList {
    fn put(&self, out: &mut PacketWriter<'_>) {
        let count = self.0.len().min(Self::MAX);
        // It is at most 64.
        (count as u16).put(out);
        for ip in &self.0[..count] {
            out.bytes(&BorrowedAddresses::bytes(*ip));
        }
    }
}

impl Field for AddressList {
    type Borrowed<'a> = BorrowedAddresses<'a>;
    const MAX: usize = size_of::<u16>() + size_of::<[u8; 16]>() * Self::MAX;
    fn own(borrowed: BorrowedAddresses<'_>) -> Self {
        Self(borrowed.iter().collect())
    }
    #[cfg(test)]
    fn spell(_name: &str, out: &mut String) {
        out.push_str("count u16, {16 bytes}*");
    }
}
