//! The memory of a doorbell device (protocol I1): what a machine knows by which of its PCI devices is the one that its host told it of.
//!
//! ```text
//!      0   magic u64 ("PWDOORBL")
//!      8   version u32 = 1
//!     16   id u128
//!   4096   the end
//! ```

/// Bytes of memory that such a device has.
pub const SIZE: usize = 4096;
/// `PWDOORBL`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"PWDOORBL");
const VERSION: u32 = 1;
const ID: usize = 16;

/// The memory of the device with this id.
pub fn memory(id: u128) -> [u8; SIZE] {
    let mut memory = [0; SIZE];
    memory[..8].copy_from_slice(&MAGIC.to_le_bytes());
    memory[8..12].copy_from_slice(&VERSION.to_le_bytes());
    memory[ID..ID + 16].copy_from_slice(&id.to_le_bytes());
    memory
}

/// The id in a private copy of a device's memory; `None` if that is no doorbell's of this version.
pub fn id(memory: &[u8; SIZE]) -> Option<u128> {
    let id = u128::from_le_bytes(memory[ID..].first_chunk().copied()?);
    (*memory == self::memory(id)).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_id_is_read_only_from_intact_memory() {
        let good = memory(u128::MAX / 3);
        assert_eq!(id(&good), Some(u128::MAX / 3));
        for at in [0, 8, 12, 40, SIZE - 1] {
            let mut bad = good;
            bad[at] ^= 1;
            assert_eq!(id(&bad), None, "byte {at}");
        }
        assert_eq!(id(&[0; SIZE]), None);
    }
}
