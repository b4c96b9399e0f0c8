//! The file that is carried, and its checksum. The machine that sends it has it as a disk that cannot be written.

use sha2::{Digest, Sha256};
use std::error::Error;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Disks have whole sectors.
const SECTOR: u64 = 512;

/// (The beginning of) a file of the host.
#[derive(Debug)]
pub(super) struct HostFile {
    path: PathBuf,
    /// Bytes that are carried.
    pub(super) size: u64,
    /// SHA-256, in hexadecimal.
    pub(super) sum: String,
}

impl HostFile {
    /// `most` bytes of the file, or of this program if there is none.
    pub(super) fn new(path: Option<&Path>, most: u64) -> Result<Self, Box<dyn Error>> {
        let path = path.map_or_else(std::env::current_exe, |path| Ok(path.to_owned()))?;
        let cannot = |e| format!("cannot read {}: {e}", path.display());
        let path = path.canonicalize().map_err(cannot)?;
        let file = File::open(&path).map_err(cannot)?;
        let size = file.metadata()?.len().min(most) / SECTOR * SECTOR;
        if size == 0 {
            return Err(format!("{} is too small to measure anything", path.display()).into());
        }
        let mut bytes = BufReader::with_capacity(1 << 20, file).take(size);
        let mut hash = Sha256::new();
        let mut piece = vec![0; 1 << 20];
        loop {
            match bytes.read(&mut piece).map_err(cannot)? {
                0 => break,
                n => hash.update(&piece[..n]),
            }
        }
        let sum = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { path, size, sum })
    }

    /// The arguments that show the file to a guest of QEMU.
    pub(super) fn arguments(&self) -> [String; 4] {
        // A comma in an option is written twice.
        let path = self.path.to_string_lossy().replace(',', ",,");
        let drive = format!("file={path},format=raw,readonly=on,if=none,id=file");
        ["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=file".into()]
    }

    /// The name of the file.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Fails if this sum, as `sha256sum` prints it, is not the original's.
    pub(super) fn compare(&self, said: &str, what: &str) -> Result<(), String> {
        match said.split_whitespace().next() {
            Some(sum) if sum == self.sum => Ok(()),
            _ => Err(format!("{what} differs from the original: {said}, not {}", self.sum)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_cut_at_a_sector_and_checksummed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        std::fs::write(file.path(), &content).unwrap();
        let payload = HostFile::new(Some(file.path()), 1 << 20).unwrap();
        assert_eq!(payload.size, 4608);
        let sum: String = Sha256::digest(&content[..4608]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(payload.compare(&format!("{sum}  -"), "it").is_ok());
        assert!(payload.compare("", "it").unwrap_err().contains("differs"));
        assert_eq!(HostFile::new(Some(file.path()), 1024).unwrap().size, 1024);
        assert!(HostFile::new(Some(Path::new("/dev/null")), 1024).is_err());
    }
}
