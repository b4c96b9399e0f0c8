//! What one client writes, renames or removes, another client sees.

use super::{LONG_CACHE, code};
use crate::common::{Way, world};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

#[test]
fn second_client_sees_writes_closed_by_first() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&[]), world.mount(&[]));
    for round in 0..100u32 {
        let text = format!("round {round}").repeat(1 + (round as usize * 37) % 900);
        fs::write(first.join("shared"), &text).unwrap();
        assert!(fs::read_to_string(second.join("shared")).unwrap() == text, "round {round}");
        // The second client has cached the content; a change in place, of the same length, must show as well.
        let other = text.replace('r', "R");
        File::options().write(true).open(first.join("shared")).unwrap().write_all_at(other.as_bytes(), 0).unwrap();
        assert!(fs::read_to_string(second.join("shared")).unwrap() == other, "round {round}, in place");
    }
}

#[test]
fn second_client_without_cache_sees_new_names_at_once() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&["--cache", "0"]), world.mount(&["--cache", "0"]));
    fs::write(first.join("shared"), "text").unwrap();
    assert_eq!(fs::metadata(second.join("shared")).unwrap().len(), 4);
    fs::write(first.join("shared"), "longer text").unwrap();
    assert_eq!(fs::metadata(second.join("shared")).unwrap().len(), 11);
    fs::rename(first.join("shared"), first.join("moved")).unwrap();
    assert!(!second.join("shared").exists());
    assert!(second.join("moved").exists());
    fs::remove_file(second.join("moved")).unwrap();
    assert_eq!(code(fs::metadata(first.join("moved"))), Errno::NOENT.raw_os_error());
}

#[test]
fn open_of_cached_name_finds_file_that_has_it_now() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    let read = |name: &str| fs::read_to_string(second.join(name));
    let write = |name: &str, text: &str| fs::write(first.join(name), text).unwrap();
    fs::create_dir(first.join("dir")).unwrap();
    for round in 0..10 {
        let text = |name: &str| format!("{name} {round}");
        // A log is rotated.
        write("log", &text("old"));
        assert_eq!(read("log").unwrap(), text("old"));
        fs::rename(first.join("log"), first.join("log.1")).unwrap();
        write("log", &text("new"));
        assert_eq!((read("log").unwrap(), read("log.1").unwrap()), (text("new"), text("old")));
        // A file is replaced.
        write("dir/next", &text("replacement"));
        fs::rename(first.join("dir/next"), first.join("log")).unwrap();
        assert_eq!(read("log").unwrap(), text("replacement"));
        // Two files change places.
        rustix::fs::renameat_with(CWD, first.join("log"), CWD, first.join("log.1"), RenameFlags::EXCHANGE).unwrap();
        assert_eq!((read("log").unwrap(), read("log.1").unwrap()), (text("old"), text("replacement")));
        // One of two names of a file is given to another file.
        fs::hard_link(first.join("log"), first.join("second-name")).unwrap();
        assert_eq!((read("second-name").unwrap(), read("log").unwrap()), (text("old"), text("old")));
        fs::rename(first.join("log.1"), first.join("log")).unwrap();
        assert_eq!((read("log").unwrap(), read("second-name").unwrap()), (text("replacement"), text("old")));
        // A file is removed, and a directory replaced.
        fs::remove_file(first.join("second-name")).unwrap();
        assert_eq!(code(read("second-name")), Errno::NOENT.raw_os_error());
        fs::create_dir(first.join("other")).unwrap();
        write("other/inside", "");
        let count = |name: &str| fs::read_dir(second.join(name)).unwrap().count();
        assert_eq!(count("dir"), 0);
        rustix::fs::renameat_with(CWD, first.join("other"), CWD, first.join("dir"), RenameFlags::EXCHANGE).unwrap();
        assert_eq!((count("dir"), count("other")), (1, 0));
        fs::remove_file(first.join("dir/inside")).unwrap();
        fs::remove_dir(first.join("other")).unwrap();
    }
}

#[test]
fn open_of_cached_file_has_size_that_another_client_gave_it() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    let path = second.join("file");
    for round in 0..20usize {
        let (long, short) = (vec![round as u8; 10_000 + 997 * round], vec![1 + round as u8; 100 + round]);
        fs::write(first.join("file"), &long).unwrap();
        assert!(fs::read(&path).unwrap() == long, "round {round}");
        fs::write(first.join("file"), &short).unwrap();
        // Without a request for the attributes in between, the kernel goes by the size that it has.
        let mut buffer = [0; 200];
        let n = File::open(&path).unwrap().read_at(&mut buffer, 0).unwrap();
        assert!(buffer[..n] == short, "round {round}: {n} bytes");
        // Both append in turn, and read by the same open file. The kernel takes an appended page for what is at the end that it knows.
        let mut expected = short;
        for (part, mounted) in [&first, &second, &first, &second].into_iter().enumerate() {
            let mut file = File::options().read(true).append(true).open(mounted.join("file")).unwrap();
            let appended = vec![part as u8; 20_000 * (1 + part)];
            file.write_all(&appended).unwrap();
            expected.extend(appended);
            let mut found = vec![0; expected.len() + 1];
            let n = file.read_at(&mut found, 0).unwrap();
            assert!(found[..n] == expected, "round {round}, part {part}: {n} bytes of {}", expected.len());
        }
        for (name, mounted) in [("first", &first), ("second", &second)] {
            assert!(fs::read(mounted.join("file")).unwrap() == expected, "round {round}: {name} client");
            assert_eq!(fs::metadata(mounted.join("file")).unwrap().len(), expected.len() as u64);
        }
    }
}

#[test]
fn times_of_opened_file_are_current() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    fs::write(first.join("file"), "text").unwrap();
    for round in 1..20 {
        fs::metadata(second.join("file")).unwrap();
        let file = File::options().write(true).open(first.join("file")).unwrap();
        file.write_all_at(b"TEXT", 0).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(round);
        file.set_modified(time).unwrap();
        drop(file);
        let open = File::open(second.join("file")).unwrap();
        assert_eq!(open.metadata().unwrap().modified().unwrap(), time);
    }
}

#[test]
fn file_without_name_can_be_opened_by_its_descriptor() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    for (name, remover) in [("here", &second), ("there", &first)] {
        fs::write(first.join(name), "text").unwrap();
        let open = File::open(second.join(name)).unwrap();
        fs::remove_file(remover.join(name)).unwrap();
        let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&open));
        for _ in 0..3 {
            assert_eq!(fs::read_to_string(&path).unwrap(), "text", "{name}");
        }
    }
}
