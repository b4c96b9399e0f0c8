//! The counters of a disk's requests.

/// Counters of a disk since its back end started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskCounters {
    /// Reads that were done.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Writes that were done.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Flushes that were done.
    pub flushes: u64,
    /// Ranges that were discarded or filled with zeroes.
    pub ranges: u64,
    /// Requests that the file or device failed.
    pub failed: u64,
    /// Requests that were not done: beyond the end, misaligned, unknown.
    pub refused: u64,
    /// Requests that an earlier back end had taken and not completed.
    pub recovered: u64,
    /// Bytes that the back end has copied, again if a request was repeated.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Those of them that were read.
    #[serde(default)]
    pub copied_read_bytes: u64,
    /// Those of them that were written.
    #[serde(default)]
    pub copied_written_bytes: u64,
    /// Bytes of writes that were passed on where they lie in a group.
    #[serde(default)]
    pub passed_bytes: u64,
    /// Queues and connections that broke the rules.
    pub broken: u64,
}

impl DiskCounters {
    /// The counters with the bytes that a store has copied.
    pub(crate) fn with_copies(self, copied: CopiedBytes) -> Self {
        let CopiedBytes { read, written, passed } = copied;
        Self {
            copied_bytes: read + written,
            copied_read_bytes: read,
            copied_written_bytes: written,
            passed_bytes: passed,
            ..self
        }
    }

    /// How often each byte was copied.
    pub fn copies(&self) -> CopiesPerByte {
        let per = |copied: u64, carried: u64| (carried > 0).then(|| copied as f64 / carried as f64);
        CopiesPerByte {
            read: per(self.copied_read_bytes, self.read_bytes),
            written: per(self.copied_written_bytes, self.written_bytes),
        }
    }
}

/// Bytes that a store has copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CopiedBytes {
    pub(crate) read: u64,
    pub(crate) written: u64,
    /// Written bytes that were named, and not copied.
    pub(crate) passed: u64,
}

/// How often a back end has copied each byte of its requests. The copies of kernels, for example into a page cache, are not among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CopiesPerByte {
    /// Each byte that was read; `None` before the first.
    pub read: Option<f64>,
    /// Each byte that was written; `None` before the first.
    pub written: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_per_byte_are_the_quotient_of_copied_and_carried() {
        let none = DiskCounters::default();
        assert_eq!(none.copies(), CopiesPerByte::default());
        let some = DiskCounters { read_bytes: 1000, written_bytes: 4000, ..none };
        let some = some.with_copies(CopiedBytes { read: 2000, written: 1000, passed: 3000 });
        assert_eq!((some.copied_bytes, some.passed_bytes), (3000, 3000));
        assert_eq!(some.copies(), CopiesPerByte { read: Some(2.0), written: Some(0.25) });
    }
}
