//! Whether one program can be accelerated by `partywall run`, and if not, why and what to do.

use std::path::PathBuf;

use super::check::Check;
use crate::program::Program;
use crate::program::elf::Elf;
use crate::program::libraries::Loaded;
use crate::program::obstacle::RingObstacle;
use crate::siblings;

const AREA: &str = "program";

/// The calls by which a program comes to have a stream socket.
const OPENERS: [&str; 5] = ["accept", "accept4", "connect", "listen", "socket"];

pub(super) fn checks(program: &Program) -> Vec<Check> {
    let obstacles = program.obstacles();
    let loaded = Loaded::of(program);
    let mut all = vec![file(program), loading(program, &obstacles), rights(&obstacles)];
    if let Some(elf) = &program.elf
        && let (true, Some(loaded)) = (obstacles.is_empty(), &loaded)
    {
        all.push(libraries(loaded));
        all.push(sockets(program, elf, loaded));
        all.push(raw_calls(loaded));
        all.push(io_uring(loaded));
        all.push(own_filter(loaded));
    }
    all.push(filter_around_us());
    all.push(library(loaded.as_ref()));
    all
}

fn file(program: &Program) -> Check {
    let shown = |path: &PathBuf| path.display().to_string();
    let means = "this is what runs; what it starts in turn is judged by itself";
    let found = match program.interpreters.split_last() {
        None => shown(&program.path),
        Some((last, between)) => {
            let via: String = between.iter().map(|path| format!(", run by {}", shown(path))).collect();
            format!(
                "{}, a script{via}, run by {}; programs that it starts inherit the library",
                shown(&program.path),
                shown(last)
            )
        }
    };
    Check::ok(AREA, "file", means, found)
}

fn loading(program: &Program, obstacles: &[RingObstacle]) -> Check {
    let means = "no library can be put before its C library: its sockets stay on TCP";
    let check = |found: String| Check::ok(AREA, "loading", means, found);
    let obstacle = obstacles.iter().find(|obstacle| !matches!(obstacle, RingObstacle::Privileged(_)));
    match (obstacle, &program.elf) {
        (Some(obstacle), _) => check(obstacle.words()).fail(obstacle.remedy()),
        (None, Some(elf)) => check(format!("dynamically linked, by {}", elf.loader.as_deref().unwrap_or("nobody"))),
        (None, None) => check("unknown".into()).warn("name the program itself"),
    }
}

fn rights(obstacles: &[RingObstacle]) -> Check {
    let means = "the loader drops LD_PRELOAD from what gains rights: its sockets stay on TCP";
    let check = |found: String| Check::ok(AREA, "rights", means, found);
    match obstacles.iter().find(|obstacle| matches!(obstacle, RingObstacle::Privileged(_))) {
        Some(obstacle) => check(obstacle.words()).fail(obstacle.remedy()),
        None => check("gains none when we run it (no set-user-id, set-group-id, file capabilities)".into()),
    }
}

fn libraries(loaded: &Loaded) -> Check {
    let means = "it does not start, with or without Partywall";
    let check = |found: String| Check::ok(AREA, "libraries", means, found);
    if loaded.missing.is_empty() {
        check(format!("all {} are there", loaded.paths.len()))
    } else {
        check(format!("not found: {}", loaded.missing.join(", "))).fail("install them, or set LD_LIBRARY_PATH")
    }
}

fn sockets(program: &Program, elf: &Elf, loaded: &Loaded) -> Check {
    let means = "there is nothing to accelerate, unless it loads more code while it runs or starts other programs";
    let called: Vec<_> = OPENERS.into_iter().filter(|name| loaded.imports.contains(*name)).collect();
    let whose = if OPENERS.iter().any(|name| elf.imports.contains(*name)) { "it" } else { "one of its libraries" };
    let check = |found: String| Check::ok(AREA, "socket calls", means, found);
    match called.as_slice() {
        [] if program.interpreters.is_empty() => {
            check("neither it nor its libraries call any".into()).warn("judge the program that has the sockets")
        }
        [] => check("its interpreter calls none".into()).warn("judge the programs that the script starts"),
        called => check(format!("{whose} calls {}", called.join(", "))),
    }
}

fn raw_calls(loaded: &Loaded) -> Check {
    let means = "a socket that a program also uses by raw system calls is noticed and stays on TCP";
    let found = if loaded.imports.contains("syscall") {
        "it, or a library of it, uses syscall(), which the library sees; `syscall` instructions cannot be known beforehand"
    } else {
        "no syscall(); `syscall` instructions cannot be known beforehand"
    };
    Check::ok(AREA, "raw system calls", means, found)
}

fn io_uring(loaded: &Loaded) -> Check {
    let means =
        "what io_uring does to a socket is seen if syscall() makes the ring; a program with liburing stays on TCP";
    let check = |found: &str| Check::ok(AREA, "io_uring", means, found);
    if loaded.has("liburing") || loaded.imports.iter().any(|name| name.starts_with("io_uring_")) {
        check("it is linked with liburing").warn("if the program can be told to use epoll instead, do so")
    } else {
        check("not linked with liburing")
    }
}

fn own_filter(loaded: &Loaded) -> Check {
    let means = "it may forbid itself what the library needs; connections made after that stay on TCP";
    let check = |found: &str| Check::ok(AREA, "own seccomp filter", means, found);
    if loaded.has("libseccomp") || loaded.imports.iter().any(|name| name.starts_with("seccomp_")) {
        check("it is linked with libseccomp").warn(
            "let its filter permit memfd_create, mmap, sendmsg, recvmsg, epoll_pwait and membarrier, or switch it off",
        )
    } else {
        check("not linked with libseccomp")
    }
}

fn filter_around_us() -> Check {
    let means = "the filter may forbid what the library needs: sockets then stay on TCP";
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map_or("", str::trim);
    let check = |found: &str| Check::ok(AREA, "seccomp around us", means, found);
    match mode {
        "2" => {
            check("we run under a filter").warn("`partywall doctor` without a command tries each thing that is needed")
        }
        _ => check("no filter"),
    }
}

/// Whether the library is there, and would find the C library that it needs.
fn library(loaded: Option<&Loaded>) -> Check {
    let means = "`partywall run` needs it, and a C library no older than it was built for";
    let check = |found: String| Check::ok(AREA, "our library", means, found);
    let path = match siblings::find_library() {
        Ok(path) => path,
        Err(failure) => {
            let message = failure.to_string();
            let (found, remedy) = message.split_once("\n  ").unwrap_or((&message, "install it"));
            return check(found.into()).fail(remedy);
        }
    };
    let shown = path.display();
    let wants = match Elf::read(&path) {
        Ok(Some(elf)) => elf.versions_needed,
        _ => return check(format!("{shown} is no library")).fail("install it again"),
    };
    let libc = loaded.and_then(Loaded::libc).and_then(|path| Elf::read(path).ok().flatten());
    let missing: Vec<String> = match &libc {
        Some(libc) => wants.iter().filter(|v| is_libcs(v) && !libc.versions_defined.contains(*v)).cloned().collect(),
        None => Vec::new(),
    };
    if missing.is_empty() {
        check(shown.to_string())
    } else {
        check(format!("{shown} wants {} of the C library", missing.join(", ")))
            .fail("build Partywall on a system as old as this one")
    }
}

/// `GLIBC_2.34`, but not `GLIBC_PRIVATE` or another library's.
fn is_libcs(version: &str) -> bool {
    version.starts_with("GLIBC_2.")
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    fn loaded(imports: &[&str], paths: &[&str]) -> Loaded {
        Loaded {
            imports: imports.iter().map(|name| (*name).to_owned()).collect(),
            paths: paths.iter().map(PathBuf::from).collect(),
            missing: Vec::new(),
        }
    }

    #[test]
    fn linked_libraries_are_judged() {
        let plain = loaded(&["read"], &["/lib/libc.so.6"]);
        let rich = loaded(&["syscall", "seccomp_load", "connect"], &["/lib/liburing.so.2", "/lib/libseccomp.so.2"]);
        assert_eq!((io_uring(&plain).status, own_filter(&plain).status), (FindingStatus::Ok, FindingStatus::Ok));
        assert_eq!((io_uring(&rich).status, own_filter(&rich).status), (FindingStatus::Warn, FindingStatus::Warn));
        assert!(raw_calls(&rich).found.contains("uses syscall()") && raw_calls(&plain).found.starts_with("no"));
        let broken = Loaded { missing: vec!["libx.so.1".into()], ..Loaded::default() };
        assert_eq!(libraries(&broken).status, FindingStatus::Fail);
    }
}
