//! Fields and attributes of the kernel's netlink messages, read without allocation.

/// The 32-bit number at a byte.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// The 16-bit number at a byte.
pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

/// Attributes `{len u16, type u16}` with their values, up to the first that does not fit.
pub(crate) fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (len, kind) = (usize::from(half(rest, 0)?), half(rest, 2)?);
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_end_at_first_that_does_not_fit() {
        let attribute = |len: u16, kind: u16| [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
        let bytes = [attribute(5, 1), vec![7, 0, 0, 0], attribute(4, 2), attribute(3, 3), attribute(4, 4)].concat();
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(1, &[7][..]), (2, &[])]);
        assert_eq!(attributes(&bytes[..4]).count() + attributes(&[]).count(), 0, "cut short");
    }
}
