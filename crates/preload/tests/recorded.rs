//! A broker without any capability, and the kernel's record of sequence numbers (protocol T3.11).

mod support;

use std::path::Path;
use std::process::Stdio;

use partywall_region::number_record::recorder;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use support::guard::Guard;
use support::netns::Namespaces;
use support::stage::{Stage, python, script};
use support::switch::{Policy, Switch};
use support::world::World;
use support::{eventually, free_port, skipped};

/// A file system for kept records, as long as this lives.
struct BpfFileSystem<'a>(&'a Path);

impl<'a> BpfFileSystem<'a> {
    fn mount(at: &'a Path) -> std::io::Result<Self> {
        mount("bpf", at, c"bpf", MountFlags::empty(), c"mode=0700")?;
        Ok(Self(at))
    }
}

impl Drop for BpfFileSystem<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn recorded_connections_between_namespaces_need_no_capability() {
    let Some(spaces) = Namespaces::create() else { return };
    let record = match recorder::record() {
        Ok(record) => record,
        Err(e) => return skipped(&format!("the kernel does not record sequence numbers here: {e}")),
    };
    drop(record);
    let world = World::without_capabilities();
    Policy::new(world.socket()).set("now");
    let switch = Switch::watch(&world);
    let stage = Stage {
        world: Some(&world),
        spaces: Some(&spaces),
        folder: tempfile::Builder::new().prefix("partywall-recorded-").tempdir().unwrap(),
    };
    let [at, _] = Namespaces::ADDRESSES;
    let (port, server) = (free_port(), script("echo_server.py"));
    let mut server = stage.server(&python(), &[&server, at, &port.to_string()]);
    stage.await_listener(&mut server, port);
    let client = || {
        let arguments = [&script("endless_client.py"), at, &port.to_string()];
        Guard::spawn(stage.command(1, Path::new(&python())).args(arguments).stdin(Stdio::piped()))
    };

    let unrecorded = client();
    eventually("the client talks before its kernel records", || spaces.serves(port));
    let place = world.number_record();
    let mounted = BpfFileSystem::mount(place.parent().unwrap()).unwrap();
    recorder::keep(&recorder::record().unwrap(), &place).unwrap();
    let recorded = client();
    eventually("the recorded connection is on a ring", || switch.channels_with(1 << 20) == 1);
    for mut client in [unrecorded, recorded] {
        drop(client.0.stdin.take());
        let output = client.output();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(switch.seen().channels, 1, "the connection from before the record stays on TCP");
    drop(mounted);
}
