//! Debian's kernel for guests: fetched as a package, unpacked beside what else is cached, never installed.

use crate::cache::Cache;
use crate::{LabError, tool};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's build of the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KernelKind {
    /// For virtual machines of clouds: the smallest one.
    #[default]
    Cloud,
    /// For all machines, with all drivers and file systems: some 70 MB to fetch.
    Full,
}

impl KernelKind {
    /// The package that always depends on the newest kernel of this kind.
    fn package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Full => "linux-image-amd64",
        }
    }

    /// The file that has the name of the unpacked kernel.
    fn current(self) -> &'static str {
        match self {
            Self::Cloud => "current",
            Self::Full => "current-full",
        }
    }
}

/// An unpacked kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// As `uname -r` says in the guest.
    pub version: String,
    /// The bootable file.
    pub image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// The kernel of this kind that is in the cache, or else the newest that `apt-get` can fetch.
    pub fn fetch(cache: &Cache, kind: KernelKind) -> Result<Self, LabError> {
        let kernels = cache.path("kernel", kind.current())?;
        if let Ok(name) = fs::read_to_string(&kernels)
            && let Ok(kernel) = Self::unpacked(&cache.path("kernel", name.trim())?)
        {
            return Ok(kernel);
        }
        let meta = kind.package();
        let depends = tool::run("apt-cache", ["depends", meta])?;
        let package = depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with("linux-image-"))
            .ok_or_else(|| LabError::tool("apt-cache", format!("{meta} depends on no linux-image package")))?
            .to_owned();
        let root = cache.entry("kernel", &package, |draft| unpack(&package, draft))?;
        fs::write(&kernels, &package).map_err(LabError::file("write", &kernels))?;
        Self::unpacked(&root)
    }

    fn unpacked(root: &Path) -> Result<Self, LabError> {
        let boot = root.join("boot");
        let names = fs::read_dir(&boot).map_err(LabError::file("read", &boot))?;
        let version = names
            .flatten()
            .find_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned()))
            .ok_or_else(|| LabError::tool("dpkg-deb", format!("no kernel in {}", boot.display())))?;
        let image = boot.join(format!("vmlinuz-{version}"));
        let modules = root.join("lib/modules").join(&version);
        Ok(Self { version, image, modules })
    }

    /// Files of the named modules and of all that they depend on, in an order in which they can be loaded.
    ///
    /// A module that is built into the kernel needs no file.
    pub fn module_files(&self, names: &[&str]) -> Result<Vec<PathBuf>, LabError> {
        let read = |file: &str| {
            let path = self.modules.join(file);
            fs::read_to_string(&path).map_err(LabError::file("read", &path))
        };
        let (depends, built_in) = (read("modules.dep")?, read("modules.builtin")?);
        let mut files = Vec::new();
        let mut seen = HashSet::new();
        for name in names {
            let line = depends.lines().find(|line| line.split(':').next().is_some_and(|file| is_module(file, name)));
            let Some((file, needs)) = line.and_then(|line| line.split_once(':')) else {
                if built_in.lines().any(|file| is_module(file, name)) {
                    continue;
                }
                return Err(LabError::Module { kernel: self.version.clone(), module: (*name).to_owned() });
            };
            // modules.dep lists the farthest dependency last.
            for file in needs.split_whitespace().rev().chain([file]) {
                if seen.insert(file.to_owned()) {
                    files.push(self.modules.join(file));
                }
            }
        }
        Ok(files)
    }
}

/// The kernel treats `-` and `_` in names of modules alike.
fn is_module(file: &str, name: &str) -> bool {
    let stem = file.rsplit('/').next().unwrap_or(file).split(".ko").next().unwrap_or(file);
    stem.replace('-', "_") == name.replace('-', "_")
}

fn unpack(package: &str, root: &Path) -> Result<(), LabError> {
    fs::create_dir_all(root).map_err(LabError::file("create", root))?;
    tool::run_command("apt-get", Command::new("apt-get").args(["-qq", "download", package]).current_dir(root))?;
    let files = fs::read_dir(root).map_err(LabError::file("read", root))?;
    let archive = files.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "deb"));
    let archive = archive.ok_or_else(|| LabError::tool("apt-get", format!("downloaded no file for {package}")))?;
    tool::run("dpkg-deb", [Path::new("-x"), &archive, root])?;
    fs::remove_file(&archive).map_err(LabError::file("remove", &archive))?;
    let version = Kernel::unpacked(root)?.version;
    // The package leaves this to its installation.
    tool::run("depmod", [Path::new("-b"), root, Path::new(&version)])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_modules_are_compared_as_the_kernel_does() {
        assert!(is_module("kernel/drivers/char/virtio_console.ko", "virtio-console"));
        assert!(is_module("kernel/a/dm-mod.ko.xz", "dm_mod"));
        assert!(!is_module("kernel/a/virtio_console.ko", "virtio"));
    }

    #[test]
    fn module_follows_its_dependencies_once() {
        let dir = tempfile::tempdir().unwrap();
        let deps = "kernel/c.ko: kernel/b.ko kernel/a.ko\nkernel/b.ko: kernel/a.ko\nkernel/a.ko:\n";
        fs::write(dir.path().join("modules.dep"), deps).unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/z.ko\n").unwrap();
        let kernel = Kernel { version: "6.1".into(), image: PathBuf::new(), modules: dir.path().to_owned() };
        let files = kernel.module_files(&["b", "z", "c"]).unwrap();
        let names: Vec<_> = files.iter().map(|f| f.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.ko", "b.ko", "c.ko"]);
        assert!(kernel.module_files(&["y"]).unwrap_err().to_string().contains("module y"));
    }
}
