//! How the sectors that a guest gives up are given back: by a hole in a file, or by a discard of a block device.

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Where the kernel shows block devices by their numbers.
const DEVICES: &str = "/sys/dev/block";

/// What a file or a block device does with sectors that are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiscardSupport {
    /// It gives them back.
    pub(super) discards: bool,
    /// It makes holes, which give sectors back and are read as zeroes.
    pub(super) holes: bool,
}

impl DiscardSupport {
    /// A file or device that keeps all sectors.
    pub(super) const NONE: Self = Self { discards: false, holes: false };

    /// Tries a hole beyond the end of a file, where there is nothing to lose.
    pub(super) fn for_file(file: &OwnedFd, end: u64) -> Self {
        const STEP: u64 = 1 << 20;
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let tried = rustix::fs::fallocate(file, mode, end.next_multiple_of(STEP), STEP);
        // Other errors are of this place. A request that has one fails by itself.
        let holes = !matches!(tried, Err(Errno::OPNOTSUPP | Errno::NOSYS));
        Self { discards: holes, holes }
    }

    /// Reads the limits of the block device with this number.
    pub(super) fn for_device(number: u64) -> Self {
        Self::in_folder(Path::new(DEVICES), number)
    }

    fn in_folder(devices: &Path, number: u64) -> Self {
        let device = devices.join(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)));
        // A partition has the queue of its disk. A limit that cannot be read is none: a request could fail by it.
        let limit = |name: &str| {
            let texts = ["queue", "../queue"].map(|queue| std::fs::read_to_string(device.join(queue).join(name)));
            texts.into_iter().flatten().next().and_then(|text| text.trim().parse().ok()).unwrap_or(0_u64)
        };
        let discards = limit("discard_max_bytes") > 0;
        Self { discards, holes: discards && limit("write_zeroes_max_bytes") > 0 }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A folder as the kernel's, with one disk `8:0` and its partition `8:1`.
    fn devices(limits: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("block/sda");
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::create_dir(disk.join("sda1")).unwrap();
        for (name, limit) in limits {
            std::fs::write(disk.join("queue").join(name), format!("{limit}\n")).unwrap();
        }
        symlink("block/sda", folder.path().join("8:0")).unwrap();
        symlink("block/sda/sda1", folder.path().join("8:1")).unwrap();
        folder
    }

    #[test]
    fn device_gives_back_sectors_within_its_limits() {
        let all = DiscardSupport { discards: true, holes: true };
        for (discard, zeroes, wanted) in [
            ("0", "0", DiscardSupport::NONE),
            ("0", "4096", DiscardSupport::NONE),
            ("2147450880", "0", DiscardSupport { discards: true, holes: false }),
            ("2147450880", "2147450880", all),
        ] {
            let folder = devices(&[("discard_max_bytes", discard), ("write_zeroes_max_bytes", zeroes)]);
            for minor in [0, 1] {
                let found = DiscardSupport::in_folder(folder.path(), rustix::fs::makedev(8, minor));
                assert_eq!(found, wanted, "8:{minor} with {discard} and {zeroes}");
            }
        }
    }

    #[test]
    fn device_with_unreadable_limits_gives_nothing_back() {
        let folder = devices(&[("discard_max_bytes", "many")]);
        for minor in [0, 2] {
            let found = DiscardSupport::in_folder(folder.path(), rustix::fs::makedev(8, minor));
            assert_eq!(found, DiscardSupport::NONE, "8:{minor}");
        }
    }

    #[test]
    fn trial_hole_changes_nothing_of_a_file() {
        let file = tempfile::tempfile().unwrap();
        rustix::fs::ftruncate(&file, 1000).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 1000], 0).unwrap();
        let file = OwnedFd::from(file);
        DiscardSupport::for_file(&file, 1000);
        let file = std::fs::File::from(file);
        let mut found = vec![0; 1000];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 0).unwrap();
        assert!(found == [7; 1000] && file.metadata().unwrap().len() == 1000);
    }
}
