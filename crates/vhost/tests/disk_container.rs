//! A disk that a program in a container exports, with the namespaces and the mounts that docs/containers.md describes.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::{Imported, Setting};
use disk_common::random::noise;
use disk_common::{FLUSH, HANG, IN, IOERR, MIB, OK, OUT};
use partywall_vhost::disk::CopiesPerByte;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use vm_memory::Bytes;

/// What docs/blk.md names for a disk of a container.
const POLICY: &str = "administrators = []\n\
    [[join]]\ndomain = \"container-*\"\nusers = [\"root\"]\n\
    [[join]]\ndomain = \"partywallblk-*\"\nusers = [\"root\"]\n\
    [[connect]]\nfrom = \"partywallblk-*\"\nto = \"container-store\"\nservice = \"data\"\n\
    [[connect]]\nfrom = \"partywallblk-*\"\nto = \"container-store\"\nservice = \"data.calls\"\n";

/// Makes the root of a container, where only a volume can be written, and executes the exporter in it.
const CONTAINER: &str = r#"
root=$1 program=$2 sockets=$3 volume=$4
mount -t tmpfs none "$root"
mkdir -p "$root/proc" "$root/usr" "$root/run/partywall" "$root/srv"
for folder in bin lib lib64 sbin; do
    if [ -L "/$folder" ]; then
        cp -P "/$folder" "$root/$folder"
    elif [ -d "/$folder" ]; then
        mkdir "$root/$folder"
        mount --rbind "/$folder" "$root/$folder"
    fi
done
mount --rbind /usr "$root/usr"
: > "$root/partywall-blk"
mount --bind "$program" "$root/partywall-blk"
mount --bind "$sockets" "$root/run/partywall"
mount -o remount,bind,ro "$root/run/partywall"
mount --bind "$volume" "$root/srv"
mount -t proc none "$root/proc"
exec chroot "$root" /partywall-blk export data /srv/image --domain container-store
"#;

/// What a container needs the right for.
const PROBE: &str = "mount -t tmpfs none /mnt && mount -t proc none /proc";

/// Whether a container can be made; otherwise it prints what is missing.
fn is_possible() -> bool {
    if rustix::process::geteuid().is_root() && runs(&mut container(&[], PROBE)) {
        return true;
    }
    println!("skipped: the containers of these tests need root with the right to mount, unshare and mount");
    false
}

fn runs(command: &mut Command) -> bool {
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// A command of a shell in new namespaces.
fn container(further: &[&str], script: &str) -> Command {
    // It ends with the test, also if that is killed.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"])
        .args(further);
    command.args(["sh", "-e", "-c", script, "sh"]).stdin(Stdio::null());
    command
}

/// An exporter in a container. All processes of the container are killed with it.
struct Container {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Container {
    /// Starts it with further options of `unshare`, and waits until it offers the disk.
    fn start(setting: &Setting, further: &[&str]) -> Self {
        let folder = |name: &str| {
            let path = setting.folder.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let mut command = container(further, CONTAINER);
        command.arg(folder("root")).arg(env!("CARGO_BIN_EXE_partywall-blk"));
        command.arg(folder("containers")).arg(folder("volume"));
        // It finds the broker's socket where containers have it.
        command.env_remove("PARTYWALL_BROKER").env_remove("PARTYWALL_DOMAIN").env("RUST_LOG", "warn");
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut this = Self { process, output };
        let mut line = String::new();
        this.output.read_line(&mut line).unwrap();
        assert_eq!(line, "exporting /srv/image as container-store:data\n");
        this
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        // The exporter is the last that has the other end.
        let _ = self.output.read_to_end(&mut Vec::new());
    }
}

/// A broker with a policy for containers, and a volume with the image of a disk.
fn setting() -> Setting {
    let setting = Setting::with_policy(POLICY, MIB);
    let volume = setting.folder.path().join("volume");
    std::fs::create_dir(&volume).unwrap();
    std::fs::rename(setting.image(), volume.join("image")).unwrap();
    setting
}

fn stored(setting: &Setting, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let image = setting.folder.path().join("volume/image");
    std::fs::File::open(image).unwrap().read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn import(setting: &Setting, grace: Duration) -> Imported {
    let imported = setting.import_with("partywallblk-1", |options| {
        options.target = "container-store:data".into();
        options.grace = grace;
    });
    imported.unwrap()
}

#[test]
fn disk_of_a_container_outlives_the_container_and_the_broker() {
    if !is_possible() {
        return;
    }
    let mut setting = setting();
    let first = Container::start(&setting, &[]);
    let disk = import(&setting, HANG);
    let mut driver = disk.driver();
    assert_eq!(driver.sectors().unwrap(), MIB / 512);
    for n in 0..8 {
        assert_eq!(driver.run(OUT, 8 * n, &noise(n, 4096), 0).unwrap().0, OK);
        assert!(driver.run(IN, 8 * n, &[], 4096).unwrap() == (OK, noise(n, 4096)));
        assert!(stored(&setting, 4096 * n) == noise(n, 4096), "the volume has another content");
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(disk.report().copies, CopiesPerByte { read: Some(1.0), written: Some(1.0) });

    drop(first);
    for n in 0..8_u64 {
        let place = driver.take_place(0).unwrap();
        driver.memory().write_slice(&noise(100 + n, 4096), driver.data(0, place)).unwrap();
        driver.offer(0, place, OUT, 8 * n, 4096, true).unwrap();
    }
    driver.kick(0).unwrap();
    assert_eq!(driver.wait(0, Duration::ZERO, Duration::from_millis(300)).unwrap(), None, "there is no container");
    // Its namespaces are other ones than those of the first.
    let _second = Container::start(&setting, &[]);
    for _ in 0..8 {
        assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
    }
    setting.restart_broker();
    for n in 0..8 {
        assert!(driver.run(IN, 8 * n, &[], 4096).unwrap() == (OK, noise(100 + n, 4096)));
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(disk.report().counters.failed, 0);
}

#[test]
fn requests_fail_while_a_container_is_away_for_long() {
    if !is_possible() {
        return;
    }
    let setting = setting();
    let first = Container::start(&setting, &[]);
    // The calls' time-out is the grace as well.
    let disk = import(&setting, Duration::from_secs(5));
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    drop(first);
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap().0, IOERR);
    let _second = Container::start(&setting, &[]);
    assert!(driver.run(IN, 0, &[], 4096).unwrap() == (OK, noise(1, 4096)));
}

#[test]
fn container_with_a_user_namespace_exports_a_disk() {
    const USERS: &[&str] = &["--user", "--map-root-user"];
    if !is_possible() {
        return;
    }
    if !runs(&mut container(USERS, PROBE)) {
        println!("skipped: no user namespace can be made here");
        return;
    }
    let setting = setting();
    let _container = Container::start(&setting, USERS);
    let disk = import(&setting, HANG);
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    assert!(driver.run(IN, 0, &[], 4096).unwrap() == (OK, noise(1, 4096)));
    assert!(stored(&setting, 0) == noise(1, 4096));
}

/// The policy names one domain. Another domain of the host, also of the same user, is refused.
#[test]
fn domain_without_a_rule_is_no_user_of_a_containers_disk() {
    if !is_possible() {
        return;
    }
    let setting = setting();
    let _container = Container::start(&setting, &[]);
    let denied = setting.join("container-other").connect("container-store:data");
    assert!(matches!(denied, Err(partywall::Error::Refused { .. })), "{denied:?}");
}
