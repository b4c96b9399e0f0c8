//! The set of files that a workload uses, with filebench's parameters: sizes by a gamma distribution of shape 1.5, folders of a given width,
//! and a part of the files present at the beginning.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::error::{During, Result};

/// The shape of the distribution of sizes.
const SHAPE: f64 = 1.5;

/// Random numbers that are the same in each run (SplitMix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// The sequence of this number.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// A number above 0, up to 1.
    fn share(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// A size with this mean. A gamma variable of shape 1.5 is the sum of an exponential one and half the square of a normal one.
    pub(crate) fn size(&mut self, mean: u64) -> u64 {
        let exponential = -self.share().ln();
        let normal = (-2.0 * self.share().ln()).sqrt() * (2.0 * std::f64::consts::PI * self.share()).cos();
        let gamma = exponential + normal * normal / 2.0;
        (gamma / SHAPE * mean as f64) as u64
    }
}

/// The parameters of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetShape {
    /// Files that are there at most.
    pub(crate) files: u32,
    /// Mean bytes of a file.
    pub(crate) mean: u64,
    /// Entries of a folder at most.
    pub(crate) width: u32,
    /// Percent of the files that are there at the beginning.
    pub(crate) present: u32,
}

/// Files in a folder. A file that a thread has taken is not given to another one.
#[derive(Debug)]
pub(crate) struct FileSet {
    root: PathBuf,
    shape: SetShape,
    lists: Mutex<Lists>,
}

#[derive(Debug)]
struct Lists {
    present: Vec<u32>,
    absent: Vec<u32>,
}

/// Removes a random entry of a list.
fn take(list: &mut Vec<u32>, random: &mut Random) -> Option<u32> {
    let at = random.below(list.len() as u64) as usize;
    (at < list.len()).then(|| list.swap_remove(at))
}

impl SetShape {
    /// Whether a file is there at the beginning.
    fn begins_with(self, file: u32) -> bool {
        u64::from(file) * 100 < u64::from(self.files) * u64::from(self.present)
    }
}

impl FileSet {
    /// Makes the files of a set below `folder`.
    pub(crate) fn make(folder: &Path, shape: SetShape) -> Result<()> {
        let mut random = Random::new(1);
        let content = vec![b'x'; 1 << 20];
        for file in 0..shape.files {
            let path = folder.join(path_of(shape, file));
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).during(format!("making {}", parent.display()))?;
            }
            if !shape.begins_with(file) {
                continue;
            }
            let mut bytes = Vec::new();
            let mut left = random.size(shape.mean) as usize;
            while left > 0 {
                let n = left.min(content.len());
                bytes.extend_from_slice(&content[..n]);
                left -= n;
            }
            fs::write(&path, bytes).during(format!("writing {}", path.display()))?;
        }
        Ok(())
    }

    /// The set that [`make`](Self::make) has made in a folder, used below `root`, which shows the same folder by another way.
    pub(crate) fn at(root: &Path, shape: SetShape) -> Self {
        let (present, absent) = (0..shape.files).partition(|file| shape.begins_with(*file));
        Self { root: root.to_owned(), shape, lists: Mutex::new(Lists { present, absent }) }
    }

    /// The path of a file.
    pub(crate) fn path(&self, file: u32) -> PathBuf {
        self.root.join(path_of(self.shape, file))
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        // A thread that panicked has at most kept a file.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A random file that is there.
    pub(crate) fn take_present(&self, random: &mut Random) -> Option<u32> {
        take(&mut self.lists().present, random)
    }

    /// A random file that is not there.
    pub(crate) fn take_absent(&self, random: &mut Random) -> Option<u32> {
        take(&mut self.lists().absent, random)
    }

    /// A file is there, and may be taken.
    pub(crate) fn put_present(&self, file: u32) {
        self.lists().present.push(file);
    }

    /// A file is not there, and may be created.
    pub(crate) fn put_absent(&self, file: u32) {
        self.lists().absent.push(file);
    }
}

/// The path of a file in a tree whose folders have `width` entries each.
fn path_of(shape: SetShape, file: u32) -> PathBuf {
    let mut folders = Vec::new();
    let mut rest = file / shape.width.max(1);
    let mut all = (shape.files - 1) / shape.width.max(1);
    while all > 0 {
        folders.push(format!("d{}", rest % shape.width.max(1)));
        rest /= shape.width.max(1);
        all /= shape.width.max(1);
    }
    folders.iter().rev().collect::<PathBuf>().join(format!("f{file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_mean_and_spread_of_gamma() {
        let mut random = Random::new(7);
        let sizes: Vec<f64> = (0..100_000).map(|_| random.size(16 << 10) as f64).collect();
        let mean = sizes.iter().sum::<f64>() / sizes.len() as f64;
        let variance = sizes.iter().map(|size| (size - mean).powi(2)).sum::<f64>() / sizes.len() as f64;
        assert!((mean / 16384.0 - 1.0).abs() < 0.02, "{mean}");
        // A gamma distribution of this shape has a variance of the squared mean divided by the shape.
        assert!((variance * SHAPE / mean.powi(2) - 1.0).abs() < 0.05, "{variance}");
    }

    #[test]
    fn folders_have_the_width_and_files_distinct_paths() {
        let shape = SetShape { files: 1_000, mean: 1, width: 20, present: 100 };
        let mut entries = std::collections::BTreeMap::<PathBuf, std::collections::BTreeSet<PathBuf>>::new();
        for file in 0..shape.files {
            let path = path_of(shape, file);
            for (parent, child) in path.ancestors().skip(1).zip(path.ancestors()) {
                entries.entry(parent.to_owned()).or_default().insert(child.to_owned());
            }
        }
        assert!(entries.values().all(|children| children.len() <= 20));
        assert_eq!(
            entries
                .values()
                .flatten()
                .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with('f'))
                .count(),
            1_000
        );
        let flat = SetShape { width: 1_000_000, ..shape };
        assert_eq!(path_of(flat, 999), PathBuf::from("f999"));
    }

    #[test]
    fn set_begins_with_its_part_of_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let shape = SetShape { files: 50, mean: 1_000, width: 20, present: 80 };
        FileSet::make(folder.path(), shape).unwrap();
        let set = FileSet::at(folder.path(), shape);
        let mut random = Random::new(3);
        let present: Vec<u32> = std::iter::from_fn(|| set.take_present(&mut random)).collect();
        let absent: Vec<u32> = std::iter::from_fn(|| set.take_absent(&mut random)).collect();
        assert_eq!((present.len(), absent.len()), (40, 10));
        assert!(present.iter().all(|file| set.path(*file).is_file()));
        assert!(absent.iter().all(|file| !set.path(*file).exists() && set.path(*file).parent().unwrap().is_dir()));
        set.put_present(present[0]);
        assert_eq!(set.take_present(&mut random), Some(present[0]));
    }
}
