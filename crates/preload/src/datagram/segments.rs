//! Which segments of joined datagrams the kernel has sent (protocol U12).

/// The segments that the kernel has sent to a destination (protocol U12). Which it refuses depends on the route, and on the kernel for a segment that is longer
/// than all bytes of the call.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentSegments {
    /// The longest of which one was full.
    full: u16,
    /// The longest that was not full, and the most bytes that it had.
    part: (u16, u16),
}

impl SentSegments {
    /// It has sent none.
    pub(super) const NONE: Self = Self { full: 0, part: (0, 0) };

    /// Whether the kernel would send this many bytes in segments of this length; 0 stands for no segments.
    pub(super) fn have(self, segment: u16, len: usize) -> bool {
        segment <= self.full || (len < segment.into() && segment <= self.part.0 && len <= self.part.1.into())
    }

    /// It has sent them.
    pub(super) fn note(&mut self, segment: u16, len: usize) {
        match u16::try_from(len) {
            Ok(len) if len < segment => {
                if segment > self.part.0 {
                    self.part = (segment, len);
                } else if segment == self.part.0 {
                    self.part.1 = self.part.1.max(len);
                }
            }
            _ => self.full = self.full.max(segment),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_the_kernel_has_not_sent_are_unknown() {
        let mut sent = SentSegments::NONE;
        assert!(sent.have(0, 65_507) && !sent.have(1, 0));
        sent.note(1400, 100);
        assert!(sent.have(1400, 100) && sent.have(1000, 99));
        assert!(!sent.have(1400, 101) && !sent.have(1401, 100) && !sent.have(100, 100));
        sent.note(1400, 1300);
        sent.note(9000, 50);
        assert!(sent.have(1400, 50) && !sent.have(1400, 51), "each at most with the other");
        sent.note(1200, 1200);
        sent.note(1000, 65_507);
        assert!(sent.have(1200, 65_507) && sent.have(1, 65_507) && sent.have(9000, 50));
        assert!(!sent.have(1201, 1201));
    }
}
