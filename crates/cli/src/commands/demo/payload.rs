//! The file that is carried: real data where there is some, and its checksum.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use partywall_terminal::{Show, typed};
use sha2::{Digest, Sha256};

use super::children::check_interrupted;
use crate::exit::{CommandFailure, Context};
use crate::human;

/// Folders where most machines have some hundred megabytes that any user may read.
const SOURCES: [&str; 3] = ["/usr/share", "/usr/lib", "/usr/bin"];
const PIECE: usize = 1 << 20;

/// A file to carry.
#[derive(Debug)]
pub(super) struct CarriedFile {
    pub(super) path: PathBuf,
    pub(super) size: u64,
    /// SHA-256, in hexadecimal.
    pub(super) sum: String,
}

impl CarriedFile {
    /// Uses a file of the user's.
    pub(super) fn from_file(path: &Path, show: &Show) -> Result<Self, CommandFailure> {
        show.step(&format!("The file to carry: {}", path.display()));
        let path = path.canonicalize().context(format_args!("cannot find {}", path.display()))?;
        show.busy("computing its checksum");
        let (size, sum) = checksum(&path)?;
        if size == 0 {
            return Err(CommandFailure::usage(format!("{} is empty: there is nothing to measure", path.display())));
        }
        show.say(&format!("   {}, SHA-256 {sum}", human::bytes(size)));
        Ok(Self { path, size, sum })
    }

    /// Makes a file of `size` bytes in `dir`.
    pub(super) fn make(dir: &Path, size: u64, show: &Show) -> Result<Self, CommandFailure> {
        show.step(&format!("Making a file of {}", human::bytes(size)));
        show.busy("making the file");
        let path = dir.join("payload");
        let file = File::create_new(&path).context(format_args!("cannot make {}", path.display()))?;
        let mut writer = BufWriter::with_capacity(PIECE, file);
        let from_tar = fill_from_tar(&mut writer, size, show)?;
        if from_tar < size {
            show.say(&format!(
                "   no more files of this machine's own: {} of pseudo-random bytes follow",
                human::bytes(size - from_tar)
            ));
            fill_pseudo_random(&mut writer, size - from_tar)?;
        }
        writer.flush().context("cannot write the file to carry")?;
        let (size, sum) = checksum(&path)?;
        show.say(&format!("   {}, SHA-256 {sum}", human::bytes(size)));
        Ok(Self { path, size, sum })
    }
}

/// A tar stream of this machine's own files, cut off at `size`. Returns how much there was.
fn fill_from_tar(out: &mut impl Write, size: u64, show: &Show) -> Result<u64, CommandFailure> {
    let mut command = Command::new("tar");
    command.arg("c").args(SOURCES.iter().filter(|s| Path::new(s).is_dir()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    show.command("", &typed(&command));
    let Ok(mut tar) = command.spawn() else {
        return Ok(0);
    };
    let copied = match tar.stdout.take() {
        Some(stdout) => copy(stdout, out, size),
        None => Ok(0),
    };
    // It has more to say than we want to hear.
    let _ = tar.kill();
    let _ = tar.wait();
    copied
}

fn copy(from: impl Read, to: &mut impl Write, most: u64) -> Result<u64, CommandFailure> {
    let mut from = from.take(most);
    let mut piece = vec![0u8; PIECE];
    let mut done = 0;
    loop {
        check_interrupted()?;
        match from.read(&mut piece).context("cannot read tar's output")? {
            0 => return Ok(done),
            n => {
                to.write_all(&piece[..n]).context("cannot write the file to carry")?;
                done += n as u64;
            }
        }
    }
}

/// Xorshift: cheap, the same each time, and no byte is like its neighbour.
fn fill_pseudo_random(out: &mut impl Write, size: u64) -> Result<(), CommandFailure> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut left = size;
    while left > 0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let n = left.min(8) as usize;
        out.write_all(&state.to_le_bytes()[..n]).context("cannot write the file to carry")?;
        left -= n as u64;
    }
    Ok(())
}

/// Length and SHA-256 of a file.
pub(super) fn checksum(path: &Path) -> Result<(u64, String), CommandFailure> {
    let read = |error: io::Error| CommandFailure::from(error).context(format_args!("cannot read {}", path.display()));
    let mut file = File::open(path).map_err(read)?;
    let mut hasher = Sha256::new();
    let mut piece = vec![0u8; PIECE];
    let mut size = 0;
    loop {
        check_interrupted()?;
        match file.read(&mut piece).map_err(read)? {
            0 => break,
            n => {
                hasher.update(&piece[..n]);
                size += n as u64;
            }
        }
    }
    Ok((size, hexadecimal(hasher)))
}

/// SHA-256 of bytes, in hexadecimal.
pub(super) fn sum_of(bytes: &[u8]) -> String {
    hexadecimal(Sha256::new_with_prefix(bytes))
}

fn hexadecimal(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_sha_256() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        let (size, sum) = checksum(&path).unwrap();
        assert_eq!(size, 3);
        assert_eq!(sum, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(sum_of(b"abc"), sum);
    }

    #[test]
    fn payload_has_requested_size() {
        let mut out = Vec::new();
        fill_pseudo_random(&mut out, 1003).unwrap();
        assert_eq!(out.len(), 1003);
        let dir = tempfile::tempdir().unwrap();
        let payload = CarriedFile::make(dir.path(), 3 << 20, &Show::new()).unwrap();
        assert_eq!(payload.path.metadata().unwrap().len(), 3 << 20);
    }
}
