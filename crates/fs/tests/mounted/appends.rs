//! Files that are opened to append: what is written goes to their end, and the pages of a mapping stay where they are.

use super::LONG_CACHE;
use crate::common::{Way, world};
use std::fs::{self, File};
use std::io::Write;
use std::process::Command;

/// Maps an `O_APPEND` file and changes its first two bytes there. Between the two it appends.
const MAP_AND_APPEND: &str = "
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND)
pages = mmap.mmap(fd, 0)
pages[0] = ord('X')
pages.flush()
os.write(fd, b' end')
pages[1] = ord('Y')
pages.flush()
os.write(fd, b' of it')
";

fn mapped_pages_stay_in_place(way: Way) {
    let Some(world) = world(way, &[]) else { return };
    let mounted = world.mount(&[]);
    let before = "text".repeat(5000);
    fs::write(mounted.join("file"), &before).unwrap();
    let status = Command::new("python3").args(["-c", MAP_AND_APPEND]).arg(mounted.join("file")).status().unwrap();
    assert!(status.success());
    let expected = format!("XY{} end of it", &before[2..]);
    for from in [world.export().join("file"), mounted.join("file")] {
        let found = fs::read_to_string(&from).unwrap();
        assert!(found == expected, "{}: {} bytes, {:?}", from.display(), found.len(), &found[..8]);
    }
}

#[test]
fn mapped_pages_of_append_file_stay_in_place_by_calls() {
    mapped_pages_stay_in_place(Way::Calls);
}

#[test]
fn mapped_pages_of_append_file_stay_in_place_by_tcp() {
    mapped_pages_stay_in_place(Way::Tcp);
}

fn appends_of_two_clients_are_kept(way: Way) {
    let Some(world) = world(way, &[]) else { return };
    let mounts = [world.mount(&LONG_CACHE), world.mount(&LONG_CACHE)];
    File::create(mounts[0].join("log")).unwrap();
    let mut open = mounts.each_ref().map(|mounted| File::options().append(true).open(mounted.join("log")).unwrap());
    let mut expected = String::new();
    // Neither client's kernel learns what the other one has appended.
    for round in 0..50 {
        for (client, file) in open.iter_mut().enumerate() {
            let line = format!("line {round} of client {client}\n");
            file.write_all(line.as_bytes()).unwrap();
            expected.push_str(&line);
        }
    }
    assert_eq!(fs::read_to_string(world.export().join("log")).unwrap(), expected);
}

#[test]
fn appends_of_two_clients_overwrite_nothing_by_calls() {
    appends_of_two_clients_are_kept(Way::Calls);
}

#[test]
fn appends_of_two_clients_overwrite_nothing_by_tcp() {
    appends_of_two_clients_are_kept(Way::Tcp);
}

/// Opens a file to append, appends, and then clears `O_APPEND`. What is written or copied to an offset afterwards goes there.
const APPEND_NO_MORE: &str = "
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND)
os.write(fd, b' end')
fcntl.fcntl(fd, fcntl.F_SETFL, 0)
os.copy_file_range(os.open(sys.argv[2], os.O_RDONLY), fd, 4, 0, 0)
os.pwrite(fd, b'Y', 1)
";

#[test]
fn file_without_append_flag_any_more_is_written_in_place() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    fs::write(mounted.join("file"), "some text").unwrap();
    fs::write(mounted.join("source"), "MORE").unwrap();
    let mut program = Command::new("python3");
    program.args([
        "-c",
        APPEND_NO_MORE,
        mounted.join("file").to_str().unwrap(),
        mounted.join("source").to_str().unwrap(),
    ]);
    assert!(program.status().unwrap().success());
    assert_eq!(fs::read_to_string(world.export().join("file")).unwrap(), "MYRE text end");
}

/// Appends blocks of 1 MiB, each of one letter, by one write that bypasses the kernel's cache.
const APPEND_DIRECTLY: &str = "
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DIRECT, 0o600)
blocks = mmap.mmap(-1, 8 << 20)
for block in range(8):
    blocks[block << 20:(block + 1) << 20] = bytes([ord('A') + block]) * (1 << 20)
for _ in range(5):
    assert os.write(fd, blocks) == len(blocks)
";

fn large_direct_append_is_in_order(way: Way) {
    let Some(world) = world(way, &[]) else { return };
    let mounted = world.mount(&[]);
    let status = Command::new("python3").args(["-c", APPEND_DIRECTLY]).arg(mounted.join("file")).status().unwrap();
    assert!(status.success());
    let written = fs::read(world.export().join("file")).unwrap();
    let found: String = written.chunks(1 << 20).map(|block| char::from(block[0])).collect();
    assert_eq!(found, "ABCDEFGH".repeat(5));
}

#[test]
fn large_direct_append_keeps_its_order_by_calls() {
    large_direct_append_is_in_order(Way::Calls);
}

#[test]
fn large_direct_append_keeps_its_order_by_tcp() {
    large_direct_append_is_in_order(Way::Tcp);
}
