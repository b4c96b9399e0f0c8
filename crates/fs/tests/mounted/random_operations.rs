//! Random operations have the same results in a mounted export and in a local directory.

use super::{LONG_CACHE, code};
use crate::common::random::Random;
use crate::common::{Way, world};
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// One random operation. Returns all that can be seen of its outcome.
fn operate(root: &Path, random: &mut Random) -> Vec<u8> {
    let name = |random: &mut Random| root.join(["a", "b", "c", "d/a", "d/b", "e"][random.below(6) as usize]);
    let path = name(random);
    let offset = random.below(300_000);
    let len = random.below(70_000) as usize;
    let open = || File::options().read(true).write(true).open(&path);
    let mut seen = Vec::new();
    let mut note = |what: i32| seen.extend(what.to_le_bytes());
    match random.below(16) {
        0 | 1 => note(code(File::options().write(true).create(true).truncate(false).open(&path))),
        2..=4 => {
            let data = random.bytes(len);
            note(code(open().and_then(|file| file.write_all_at(&data, offset))));
        }
        5..=7 => match open() {
            Ok(file) => {
                let mut data = vec![0; len];
                let n = file.read_at(&mut data, offset).unwrap();
                data.truncate(n);
                seen = data;
            }
            Err(e) => note(code::<()>(Err(e))),
        },
        8 => note(code(open().and_then(|file| file.set_len(offset)))),
        9 => {
            let data = random.bytes(len / 10);
            note(code(File::options().append(true).open(&path).and_then(|mut file| file.write_all(&data))));
        }
        10 => {
            let to = name(random);
            let flags = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][random.below(3) as usize];
            note(code(rustix::fs::renameat_with(CWD, &path, CWD, &to, flags).map_err(Into::into)));
        }
        11 => note(code(fs::remove_file(&path))),
        12 => {
            let to = name(random);
            note(code(fs::hard_link(&path, to)));
        }
        13 => {
            let mode = [FallocateFlags::empty(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE]
                [random.below(2) as usize];
            let outcome = open().and_then(|file| Ok(rustix::fs::fallocate(&file, mode, offset, len as u64 + 1)?));
            note(code(outcome));
        }
        14 => note(code(fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + random.below(0o70) as u32)))),
        _ => match fs::symlink_metadata(&path) {
            Ok(found) => {
                note(found.mode().cast_signed());
                note(found.nlink() as i32);
                note(found.len() as i32);
            }
            Err(e) => note(code::<()>(Err(e))),
        },
    }
    seen
}

/// Everything in a directory, by name.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for folder in [root.to_owned(), root.join("d")] {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let path = entry.path();
                let name = path.strip_prefix(root).unwrap().display().to_string();
                all.insert(name, fs::read(path).unwrap());
            }
        }
    }
    all
}

fn random_operations(way: Way, options: &[&str], steps: usize) {
    let Some(world) = world(way, &[]) else { return };
    let mounted = world.mount(options);
    let oracle = tempfile::tempdir().unwrap();
    for root in [mounted.path(), oracle.path()] {
        fs::create_dir(root.join("d")).unwrap();
    }
    for seed in [0x9e37_79b9, 77] {
        let (mut here, mut there) = (Random(seed), Random(seed));
        for step in 0..steps {
            let (a, b) = (operate(mounted.path(), &mut here), operate(oracle.path(), &mut there));
            assert!(a == b, "seed {seed}, step {step}: {} bytes beside {}", a.len(), b.len());
        }
        assert!(contents(mounted.path()) == contents(oracle.path()), "seed {seed}: other contents at the client");
        assert!(contents(world.export()) == contents(oracle.path()), "seed {seed}: other contents at the server");
    }
    assert!(mounted.end(), "the mount ends in order");
}

#[test]
fn random_operations_by_calls_match_a_local_directory() {
    random_operations(Way::Calls, &[], 400);
}

#[test]
fn random_operations_without_cache_match_a_local_directory() {
    random_operations(Way::Calls, &["--cache", "0"], 200);
}

#[test]
fn random_operations_with_long_cache_match_a_local_directory() {
    random_operations(Way::Calls, &LONG_CACHE, 400);
}

#[test]
fn random_operations_by_a_stream_match_a_local_directory() {
    random_operations(Way::Stream, &[], 200);
}

#[test]
fn random_operations_by_tcp_match_a_local_directory() {
    random_operations(Way::Tcp, &[], 200);
}
