//! Clients that lie, and a directory that changes under the server.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

use common::random::Random;
use partywall_fs::export::{Export, ExportOptions, ExportSession};
use partywall_fs::frame::{ReplyHeader, RequestHeader};
use partywall_fs::serve::serve_tcp;
use partywall_fs::wire::{EntryName, FileEntry, FileField, FileRequest, ROOT, VERSION, bytes_of, value_of};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn session(path: &Path) -> (Arc<Export>, Arc<ExportSession>) {
    let mut options = ExportOptions::default();
    options.squash = partywall_fs::export::Squash::None;
    let export = Export::open(path, options).unwrap();
    let session = export.begin(None).unwrap();
    (export, session)
}

fn lookup(session: &ExportSession, parent: u64, name: &str) -> Result<FileEntry, Errno> {
    let name = EntryName::new(name.as_bytes())?;
    value_of(&session.execute(0, 0, FileRequest::Lookup { parent, name })?)
}

/// The first bytes of a file, if the server opens it.
fn read(session: &ExportSession, node: u64) -> Result<Vec<u8>, Errno> {
    let opened = session.execute(0, 0, FileRequest::Open { node, flags: 0 })?;
    let handle = u64::take(&mut &opened[..])?;
    let data = session.execute(0, 0, FileRequest::Read { handle, offset: 0, len: 64 });
    session.execute(0, 0, FileRequest::Release { handle, owner: 0 })?;
    data
}

#[test]
fn links_out_of_the_directory_are_never_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (inside, outside) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    for (name, target) in [("up", "../out"), ("whole", "/"), ("file", "../out/secret"), ("magic", "/proc/self/root")] {
        std::os::unix::fs::symlink(target, inside.join(name)).unwrap();
    }
    let (_export, session) = session(&inside);
    for name in ["up", "whole", "file", "magic"] {
        let link = lookup(&session, ROOT, name).unwrap();
        assert_eq!(link.attributes.mode & 0o170_000, 0o120_000, "{name} was followed");
        assert_eq!(lookup(&session, link.node, "secret").unwrap_err(), Errno::NOTDIR);
        assert_eq!(session.execute(0, 0, FileRequest::Open { node: link.node, flags: 0 }).unwrap_err(), Errno::LOOP);
        assert_eq!(session.execute(0, 0, FileRequest::OpenDirectory { node: link.node }).unwrap_err(), Errno::NOTDIR);
        let create =
            FileRequest::Create { parent: ROOT, name: EntryName::new(name.as_bytes()).unwrap(), mode: 0o600, flags: 2 };
        assert_eq!(session.execute(0, 0, create).unwrap_err(), Errno::LOOP);
        let access = session.execute(0, 0, FileRequest::CheckAccess { node: link.node, mask: 2 });
        assert!(access.is_ok(), "a link has no permissions, and is not followed");
        let change = FileRequest::SetAttributes {
            node: link.node,
            handle: 0,
            mask: 8,
            mode: 0,
            uid: 0,
            gid: 0,
            size: 0,
            accessed: 0,
            accessed_nanos: 0,
            modified: 0,
            modified_nanos: 0,
        };
        assert_eq!(session.execute(0, 0, change).unwrap_err(), Errno::INVAL, "truncation");
        let change = match change {
            FileRequest::SetAttributes { .. } => FileRequest::SetAttributes {
                node: link.node,
                handle: 0,
                mask: 2,
                mode: 0,
                uid: 4242,
                gid: 0,
                size: 0,
                accessed: 0,
                accessed_nanos: 0,
                modified: 0,
                modified_nanos: 0,
            },
            other => other,
        };
        let _ = session.execute(0, 0, change);
    }
    assert_eq!(fs::read_to_string(outside.join("secret")).unwrap(), "secret");
    use std::os::unix::fs::MetadataExt;
    assert_ne!(fs::metadata(outside.join("secret")).unwrap().uid(), 4242, "the owner of a link's target was changed");
}

#[test]
fn directory_that_is_swapped_with_a_link_shows_nothing_outside() {
    let folder = tempfile::tempdir().unwrap();
    let (inside, outside) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir_all(inside.join("swap")).unwrap();
    fs::create_dir_all(&outside).unwrap();
    fs::write(inside.join("swap/name"), "inside").unwrap();
    fs::write(outside.join("name"), "outside").unwrap();
    std::os::unix::fs::symlink("../out", inside.join("link")).unwrap();
    let (_export, session) = session(&inside);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                let _ = rustix::fs::renameat_with(
                    CWD,
                    inside.join("swap"),
                    CWD,
                    inside.join("link"),
                    RenameFlags::EXCHANGE,
                );
            }
        });
        let (mut links, mut files) = (0, 0);
        for round in 0.. {
            let Ok(entry) = lookup(&session, ROOT, "swap") else { continue };
            match lookup(&session, entry.node, "name").and_then(|entry| read(&session, entry.node)) {
                Ok(text) => {
                    assert_eq!(text, b"inside", "the server has left its directory");
                    files += 1;
                }
                Err(_) => links += 1,
            }
            if (links > 50 && files > 50) || round > 100_000 {
                break;
            }
        }
        is_over.store(true, Ordering::Release);
        assert!(links > 0 && files > 0, "there was no race: {links} links, {files} files");
    });
}

#[test]
fn random_requests_neither_crash_nor_leave_directory() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("in");
    fs::create_dir(&inside).unwrap();
    fs::write(folder.path().join("witness"), "untouched").unwrap();
    let (export, session) = session(&inside);
    let mut random = Random(4711);
    for _ in 0..20_000 {
        let number = random.below(36) as u32;
        let len = random.below(120) as usize;
        let mut body = random.bytes(len);
        // Small numbers are nodes and handles that exist.
        for chunk in body.chunks_mut(8) {
            if chunk.len() == 8 && random.below(3) > 0 {
                chunk.copy_from_slice(&random.below(40).to_le_bytes());
            }
        }
        if random.below(2) == 0 {
            // A well-formed name, perhaps one that leads out.
            let name: &[u8] = [&b"a"[..], b"b", b"..", b"a/b", b"."][random.below(5) as usize];
            body = bytes_of(&random.below(40));
            name.put(&mut body);
            let _ = random.below(2) == 0 && {
                body.extend(random.below(0o10000).to_le_bytes());
                true
            };
        }
        if let Ok(request) = FileRequest::read(number, &body) {
            let _ = session.execute(0, 0, request);
        }
    }
    assert!(inside.exists());
    assert_eq!(fs::read_to_string(folder.path().join("witness")).unwrap(), "untouched");
    export.end(&session);
    let get = FileRequest::GetAttributes { node: ROOT, handle: 0 };
    assert_eq!(session.execute(0, 0, get).unwrap_err(), Errno::NOTCONN);
    assert_eq!(session.counts(), (1, 0, 0), "an ended session has something open");
}

#[test]
fn ending_session_lasts_until_running_request_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let export = Export::open(folder.path(), ExportOptions::default()).unwrap();
    let session = export.begin(None).unwrap();
    let running = session.begin_request().unwrap();
    std::thread::scope(|s| {
        let ending = s.spawn(|| export.end(&session));
        common::eventually("the session does not end", || session.begin_request().is_err());
        // The client's next session finds it, and waits.
        assert_eq!(export.sessions(), 1);
        drop(running);
        ending.join().unwrap();
    });
    assert_eq!(export.sessions(), 0);
}

/// A client of frames that says what it wants.
struct Liar(TcpStream);

impl Liar {
    fn send(&mut self, number: u32, body: &[u8]) {
        let header = RequestHeader { len: body.len() as u32, id: 1, number, uid: 0, gid: 0 };
        let _ = self.0.write_all(&[&header.bytes()[..], body].concat());
    }

    fn reply(&mut self) -> Option<(i32, Vec<u8>)> {
        let mut body = Vec::new();
        let header = ReplyHeader::read(&mut self.0, &mut body).ok()??;
        Some((header.errno, body))
    }
}

/// A first session's first request.
fn greeting(version: u32) -> Vec<u8> {
    [bytes_of(&version), bytes_of(&0u64)].concat()
}

#[test]
fn lying_client_gets_errors_or_its_end_and_disturbs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "text").unwrap();
    let mut options = ExportOptions::default();
    options.squash = partywall_fs::export::Squash::None;
    let export = Export::open(folder.path(), options).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = Arc::clone(&export);
    std::thread::spawn(move || serve_tcp(&served, &listener));
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Liar(stream)
    };
    let greet = || {
        let mut client = connect();
        client.send(1, &greeting(VERSION));
        assert_eq!(client.reply().unwrap().0, 0);
        client
    };
    let mut honest = greet();
    let mut look = move || {
        let mut body = bytes_of(&ROOT);
        (&b"file"[..]).put(&mut body);
        honest.send(2, &body);
        assert_eq!(honest.reply().unwrap().0, 0, "another client is disturbed");
    };
    look();
    // No greeting, another version, a greeting twice.
    let mut client = connect();
    client.send(2, &[0; 12]);
    assert!(client.reply().is_none());
    let mut client = connect();
    client.send(1, &greeting(99));
    assert_eq!(client.reply().unwrap().0, Errno::PROTONOSUPPORT.raw_os_error());
    // Version 1 had no more than that.
    let mut client = connect();
    client.send(1, &bytes_of(&1u32));
    assert_eq!(client.reply().unwrap().0, Errno::PROTONOSUPPORT.raw_os_error());
    // A session that it never had.
    let mut client = connect();
    client.send(1, &[bytes_of(&VERSION), bytes_of(&u64::MAX)].concat());
    assert_eq!(client.reply().unwrap().0, 0);
    let mut client = greet();
    client.send(1, &greeting(VERSION));
    assert_eq!(client.reply().unwrap().0, Errno::BADMSG.raw_os_error());
    // Handles and nodes that it does not have, an unknown operation, a read of all memory.
    for (number, body, errno) in [
        (16, [7u64.to_le_bytes(), 0u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat()[..20].to_vec(), Errno::BADF),
        (17, [bytes_of(&9u64), bytes_of(&u64::MAX), bytes_of(&0u32)].concat(), Errno::BADF),
        (17, [bytes_of(&9u64), bytes_of(&0u64), bytes_of(&2u32)].concat(), Errno::INVAL),
        (17, vec![0; 19], Errno::BADMSG),
        (17, vec![0; 3], Errno::BADMSG),
        (4, [12u64.to_le_bytes(), 0u64.to_le_bytes()].concat(), Errno::STALE),
        (77, Vec::new(), Errno::NOSYS),
        (0, Vec::new(), Errno::NOSYS),
    ] {
        client.send(number, &body);
        assert_eq!(client.reply().unwrap().0, errno.raw_os_error(), "operation {number}");
    }
    // A body that never comes, and one that is too long.
    client.0.write_all(&RequestHeader { len: 1 << 30, id: 1, number: 2, uid: 0, gid: 0 }.bytes()).unwrap();
    assert!(client.reply().is_none(), "a body of a gigabyte was taken");
    let mut cut = greet();
    cut.0.write_all(&RequestHeader { len: 100, id: 1, number: 2, uid: 0, gid: 0 }.bytes()).unwrap();
    look();
    drop(cut);
    // More open files than a session may have.
    let mut greedy = greet();
    let mut refused = None;
    for _ in 0..9000 {
        greedy.send(21, &bytes_of(&ROOT));
        let (errno, _) = greedy.reply().unwrap();
        if errno != 0 {
            refused = Some(errno);
            break;
        }
    }
    assert_eq!(refused, Some(Errno::MFILE.raw_os_error()));
    look();
    drop(greedy);
    common::eventually("sessions of clients that are gone stayed", || export.sessions() <= 2);
    look();
    let _ = client.0.read(&mut [0]);
}

#[test]
fn next_session_of_a_client_ends_its_previous_stream() {
    let folder = tempfile::tempdir().unwrap();
    let export = Export::open(folder.path(), ExportOptions::default()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || serve_tcp(&export, &listener));
    let begin = |previous: u64| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut client = Liar(stream);
        client.send(1, &[bytes_of(&VERSION), bytes_of(&previous)].concat());
        let (errno, welcome) = client.reply().unwrap();
        assert_eq!(errno, 0);
        (client, u64::take(&mut &welcome[..]).unwrap())
    };
    // The first stream stays open here, as that of a client that the server does not see go.
    let (mut first, session) = begin(0);
    let _second = begin(session);
    assert_eq!(first.0.read(&mut [0]).unwrap(), 0);
}
