//! Memory: whether what one side shows to another is safe from both (protocol M1, M2).

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::check::Check;
use super::probe::try_map;
use super::read_line;

const AREA: &str = "memory";
const LEN: u64 = 8192;

/// All four that protocol M1 asks for.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

pub(super) fn checks() -> Vec<Check> {
    vec![seals(), one_writer(), allocation(), huge_pages(), transparent_huge_pages()]
}

fn memfd() -> Result<OwnedFd, Errno> {
    let fd = rustix::fs::memfd_create("partywall-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, LEN)?;
    Ok(fd)
}

fn seals() -> Check {
    let tried = memfd().and_then(|fd| {
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        let has = rustix::fs::fcntl_get_seals(&fd)?;
        let grown = rustix::fs::ftruncate(&fd, LEN * 2);
        let shrunk = rustix::fs::ftruncate(&fd, 0);
        Ok((has, grown, shrunk))
    });
    let check = |found: String| {
        Check::ok(AREA, "memfd seals", "a peer could shrink memory under our feet; channels are refused", found)
    };
    let remedy =
        "use Linux 5.1 or later, and let container and seccomp profiles permit memfd_create and fcntl(F_ADD_SEALS)";
    match tried {
        Ok((has, Err(Errno::PERM), Err(Errno::PERM))) if has.contains(SEALS) => {
            check("a sealed memfd neither grows nor shrinks, and the seals stay".into())
        }
        Ok((has, ..)) => check(format!("seals are taken ({has:?}) but do not hold")).fail(remedy),
        Err(Errno::INVAL) => check("this kernel does not know F_SEAL_FUTURE_WRITE".into()).fail(remedy),
        Err(error) => check(format!("no sealed memfd: {error}")).fail(remedy),
    }
}

fn one_writer() -> Check {
    let check = |found: String| {
        Check::ok(AREA, "one writer per byte", "a peer could write into memory that it was only shown", found)
    };
    let remedy = "use Linux 5.1 or later with /proc mounted";
    match try_one_writer() {
        Ok(OneWriter { map: Err(Errno::PERM), write: Err(Errno::PERM), read: Ok(()) }) => {
            check("F_SEAL_FUTURE_WRITE: others can map to read, neither map to write nor write".into())
        }
        Ok(tried) => check(format!("F_SEAL_FUTURE_WRITE does not hold: {tried:?}")).fail(remedy),
        Err(error) => check(format!("cannot try: {error}")).fail(remedy),
    }
}

/// The operations that a receiver of a sealed memfd could perform.
#[derive(Debug)]
struct OneWriter {
    map: Result<(), Errno>,
    write: Result<(), Errno>,
    read: Result<(), Errno>,
}

fn try_one_writer() -> Result<OneWriter, Errno> {
    let fd = memfd()?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    // A second open file of the same memory, readable and writable: what an attacker would try first.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let open = OpenOptions::new().read(true).write(true).open(path);
    let second: File = open.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let len = LEN as usize;
    Ok(OneWriter {
        map: try_map(&second, len, true),
        write: rustix::io::pwrite(&second, b"x", 0).map(drop),
        read: try_map(&second, len, false),
    })
}

fn allocation() -> Check {
    let tried = memfd().and_then(|fd| {
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, LEN)?;
        rustix::fs::fstat(&fd)
    });
    let check = |found: String| {
        Check::ok(AREA, "allocation ahead", "touching a ring could fail later, when it is too late for an error", found)
    };
    match tried {
        Ok(stat) if u64::try_from(stat.st_blocks).is_ok_and(|blocks| blocks * 512 >= LEN) => {
            check("fallocate reserves all memory of a region when it is made".into())
        }
        Ok(stat) => check(format!("fallocate says yes, but only {} blocks are there", stat.st_blocks))
            .fail("use a kernel with a complete tmpfs (CONFIG_SHMEM)"),
        Err(Errno::NOSPC | Errno::NOMEM) => check("no memory is left for two pages".into())
            .fail("free memory, or raise the memory limit of this cgroup"),
        Err(error) => check(format!("fallocate: {error}")).fail("use a kernel with a complete tmpfs (CONFIG_SHMEM)"),
    }
}

fn huge_pages() -> Check {
    let free = |size: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{size}/free_hugepages");
        super::read_number(&path).unwrap_or(0)
    };
    let tried =
        rustix::fs::memfd_create("partywall-doctor", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
            .and_then(|fd| {
                rustix::fs::ftruncate(&fd, 2 << 20)?;
                rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, 2 << 20)
            });
    let means = "rings cannot be put on huge pages; everything else works, and most loads do not notice";
    match tried {
        Ok(()) => Check::ok(AREA, "huge pages", means, format!("{} of 2 MiB are free", free("2048kB"))),
        Err(Errno::NOSPC | Errno::NOMEM) => Check::ok(AREA, "huge pages", means, "none of 2 MiB is reserved")
            .warn("only if you want them: `sysctl -w vm.nr_hugepages=64` reserves 128 MiB"),
        Err(error) => Check::ok(AREA, "huge pages", means, format!("not available: {error}"))
            .warn("only if you want them: a kernel with CONFIG_HUGETLBFS"),
    }
}

fn transparent_huge_pages() -> Check {
    let means = "the kernel's own choice of page size for shared memory";
    let found = read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .map_or_else(|_| "not offered".into(), |line| chosen(&line).to_owned());
    Check::ok(AREA, "transparent huge", means, format!("for shared memory: {found}"))
}

/// The choice in brackets, of a file like `always [never] force`.
fn chosen(line: &str) -> &str {
    line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(line, |(choice, _)| choice)
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    #[test]
    fn missing_seal_is_detected() {
        // The same probe must find that it can write memory that is not sealed. This shows that the probe can fail.
        let fd = memfd().unwrap();
        let second =
            OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        assert_eq!(try_map(&second, LEN as usize, true), Ok(()));
        assert_eq!(rustix::io::pwrite(&second, b"x", 0), Ok(1));
    }

    #[test]
    fn memory_checks_pass_on_this_kernel() {
        assert_eq!(seals().status, FindingStatus::Ok);
        assert_eq!(one_writer().status, FindingStatus::Ok);
        assert_eq!(allocation().status, FindingStatus::Ok);
    }

    #[test]
    fn selected_setting_is_the_one_in_brackets() {
        assert_eq!(chosen("always within_size [advise] never"), "advise");
        assert_eq!(chosen("advise"), "advise");
    }
}
