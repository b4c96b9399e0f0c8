//! The image that a guest boots: Debian's kernel, and a file system in memory with busybox, kernel modules and programs of the host.
//!
//! Programs need not be static: the libraries that they are linked with on the host go along.

use crate::cache::{Cache, ContentHash};
use crate::cpio::{Archive, EntryKind};
use crate::kernel::{Kernel, KernelKind};
use crate::{LabError, program, tool};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The helper that runs commands in a guest, as a program of the host.
const HELPER: &str = "partywall-lab-guest";

/// The modules that every guest loads: for PCI devices of virtio, the serial ports, and the `/dev/dax*` of a window.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "libnvdimm",
    "virtio_pmem",
    "nd_pmem",
    "nfit",
    "dax_pmem",
    "device_dax",
];

const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/
mkdir -p /proc /sys /dev /tmp /run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmp /dev/shm
while read -r module; do
    insmod \"/lib/lab/$module\" || echo \"init: cannot load $module\"
done < /lib/lab/order
ip link set lo up
hostname \"$(sed -n 's/.*lab\\.name=\\([^ ]*\\).*/\\1/p' /proc/cmdline)\"
address=$(sed -n 's/.*lab\\.address=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
if [ -n \"$address\" ]; then
    ip address add \"$address/24\" dev eth0 && ip link set eth0 up || echo 'init: no network'
fi
if grep -q lab.shell /proc/cmdline; then
    while :; do setsid -c sh -l < /dev/ttyS1 > /dev/ttyS1 2>&1; sleep 1; done &
fi
partywall-lab-guest
echo 'init: the helper has ended'
poweroff -f
";

/// A bootable pair of files.
#[derive(Debug, Clone)]
pub struct Image {
    /// The file of the kernel.
    pub kernel: PathBuf,
    /// The file system.
    pub initrd: PathBuf,
    /// The kernel's version.
    pub version: String,
}

/// The additional content of an image.
#[derive(Debug, Clone, Default)]
pub struct ImageOptions {
    programs: Vec<(PathBuf, String)>,
    modules: Vec<String>,
    kernel: KernelKind,
}

impl ImageOptions {
    /// A program of the host, under `/bin` by the name given, without what only a debugger needs.
    pub fn program(mut self, path: impl Into<PathBuf>, name: &str) -> Self {
        self.programs.push((path.into(), name.to_owned()));
        self
    }

    /// A further kernel module.
    pub fn module(mut self, name: &str) -> Self {
        self.modules.push(name.to_owned());
        self
    }

    /// Another kernel than Debian's for clouds.
    pub fn kernel(mut self, kind: KernelKind) -> Self {
        self.kernel = kind;
        self
    }
}

impl Image {
    /// Builds it, or finds it as built before from the same parts.
    pub fn build(cache: &Cache, options: &ImageOptions) -> Result<Self, LabError> {
        let kernel = Kernel::fetch(cache, options.kernel)?;
        let mut programs = options.programs.clone();
        programs.push((helper()?, HELPER.to_owned()));
        programs.push((busybox()?, "busybox".to_owned()));
        let modules: Vec<&str> = MODULES.iter().copied().chain(options.modules.iter().map(String::as_str)).collect();

        let mut hash = ContentHash::default();
        hash.word(INIT);
        hash.word(&kernel.version);
        for module in &modules {
            hash.word(module);
        }
        for (path, name) in &programs {
            hash.word(name);
            hash.file(path)?;
        }
        let name = format!("{}.cpio", hash.name());
        let initrd = cache.entry("image", &name, |draft| {
            let parts = ImageParts::collect(&kernel, &modules, &programs)?;
            parts.write(draft).map_err(LabError::file("write", draft))
        })?;
        Ok(Self { kernel: kernel.image, initrd, version: kernel.version })
    }
}

/// Names in the guest, without the leading slash, and their content.
#[derive(Debug, Default)]
struct ImageParts {
    files: BTreeMap<String, (EntryKind, Vec<u8>)>,
}

impl ImageParts {
    fn collect(kernel: &Kernel, modules: &[&str], programs: &[(PathBuf, String)]) -> Result<Self, LabError> {
        let mut parts = Self::default();
        parts.add("init", EntryKind::Program, INIT.into());
        let mut order = String::new();
        for file in kernel.module_files(modules)? {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            order.push_str(&name);
            order.push('\n');
            parts.add(&format!("lib/lab/{name}"), EntryKind::File, read(&file)?);
        }
        parts.add("lib/lab/order", EntryKind::File, order.into());
        for (path, name) in programs {
            parts.add(&format!("bin/{name}"), EntryKind::Program, stripped(path)?);
            for library in libraries(path)? {
                let name = library.to_string_lossy();
                parts.add(name.trim_start_matches('/'), EntryKind::Program, read(&library)?);
            }
        }
        // Where scripts expect it.
        parts.add("bin/sh", EntryKind::Link, b"busybox".to_vec());
        Ok(parts)
    }

    fn add(&mut self, name: &str, kind: EntryKind, content: Vec<u8>) {
        for folder in Path::new(name).ancestors().skip(1).filter(|f| !f.as_os_str().is_empty()) {
            let folder = folder.to_string_lossy().into_owned();
            self.files.entry(folder).or_insert((EntryKind::Folder, Vec::new()));
        }
        self.files.insert(name.to_owned(), (kind, content));
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut archive = Archive::new(BufWriter::new(File::create(path)?));
        // In the order of their names a folder comes before what is in it.
        for (name, (kind, content)) in &self.files {
            archive.add(name, *kind, content)?;
        }
        archive.finish()?.flush()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, LabError> {
    fs::read(path).map_err(LabError::file("read", path))
}

fn stripped(path: &Path) -> Result<Vec<u8>, LabError> {
    let copy = tempfile::NamedTempFile::new().map_err(LabError::file("create", std::env::temp_dir()))?;
    tool::run("strip", [Path::new("-o"), copy.path(), path])?;
    read(copy.path())
}

/// The libraries of a program and its loader, by their paths on the host.
pub(crate) fn libraries(path: &Path) -> Result<Vec<PathBuf>, LabError> {
    let listed = match tool::run("ldd", [path]) {
        Ok(listed) => listed,
        Err(LabError::Tool { why, .. }) if why.contains("not a dynamic executable") => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    // "name => /path (0x..)", "/path (0x..)"; without a path it is the kernel's own.
    Ok(listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// `$PARTYWALL_LAB_GUEST` says otherwise.
fn helper() -> Result<PathBuf, LabError> {
    std::env::var_os("PARTYWALL_LAB_GUEST").map_or_else(|| program::beside(HELPER), |path| Ok(path.into()))
}

fn busybox() -> Result<PathBuf, LabError> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .ok_or_else(|| LabError::tool("busybox", "it is not installed"))
}
