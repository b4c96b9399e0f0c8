//! A program that is started by `exec` gets nothing of ours: no session, link, region or socket of the broker.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::alone;
use common::*;
use partywall::{MessageListener, MessageSocket, Options, Publisher, SlowReader, Subscriber};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

/// The open descriptors of a program that this test starts, as the kernel names them, except its own directory listing.
fn inherited() -> BTreeSet<String> {
    let ls = Command::new("ls").args(["-l", "/proc/self/fd"]).stdin(Stdio::null()).output().unwrap();
    assert!(ls.status.success(), "{}", String::from_utf8_lossy(&ls.stderr));
    // `l-wx------ 1 me me 64 Jan 1 00:00 7 -> socket:[123]`: its outputs are pipes, made again each time.
    let named = String::from_utf8(ls.stdout).unwrap();
    let targets = named.lines().filter_map(|line| line.split_once(" -> ")).map(|(_, target)| target.to_owned());
    targets.filter(|target| !target.starts_with("pipe:") && !target.starts_with("/proc/")).collect()
}

/// The open descriptors of this process, with duplicates.
fn open() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.map(|target| target.to_string_lossy().into_owned()).collect()
}

#[test]
fn started_program_inherits_no_descriptors() {
    alone("started_program_inherits_no_descriptors", || {
        let _guard = hang_guard();
        let before = inherited();
        let world = World::new();
        // This process has one object of each kind, in both roles.
        let (mut there, mut here) = world.connection(&adaptive(4096, 1 << 20));
        let mut listener = world.web.bind("waiting").unwrap();
        let waiting = world.shop.connect("web:waiting").unwrap();
        let mut messages = MessageListener::bind(&world.web, "messages", &Options::default()).unwrap();
        let mut socket = MessageSocket::connect_with(&world.shop, "web:messages", &Options::default()).unwrap();
        let mut answering = messages.accept().unwrap().0;
        let mut publisher = Publisher::bind(&world.web, "feed", SlowReader::Hold, &Options::default()).unwrap();
        let mut subscriber = Subscriber::connect_with(&world.shop, "web:feed", &Options::default()).unwrap();
        publisher.admit().unwrap();
        // In use, with a ring that was replaced.
        there.writer().unwrap().reserve(1 << 20).unwrap().commit(3);
        here.read_exact(&mut [0; 3]).unwrap();
        here.write_all(b"back").unwrap();
        socket.send(b"message").unwrap();
        answering.recv(&mut Vec::new()).unwrap();
        publisher.send(b"news").unwrap();
        subscriber.recv(&mut Vec::new()).unwrap();

        let ours = |kind: &str| open().iter().filter(|target| target.starts_with(kind)).count();
        assert!(ours("socket:") > 20 && ours("/memfd:partywall") > 0, "{:?}", open());
        assert_eq!(inherited(), before);
        // It would be noticed: a copy of a link that is not close-on-exec.
        let copy = rustix::io::dup(there.reader().unwrap().as_fd()).unwrap();
        assert_eq!(inherited().len(), before.len() + 1);
        drop(copy);

        // Descriptors that were received with `accept` are not inherited either.
        let accepted = listener.accept().unwrap().0;
        assert_eq!(inherited(), before);
        drop((accepted, waiting));
    });
}
