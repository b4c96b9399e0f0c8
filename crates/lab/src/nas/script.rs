//! What the machines of an appliance run, as lines for their shells. The shell is of busybox, whose own programs a path passes over.

use super::{MOUNT, NasPart};
use std::fmt::Write;

/// Disks of the RAID.
pub(super) const DISKS: usize = 3;
/// The address of the machine with the file system, behind the gateway.
pub(super) const INSIDE: &str = "10.99.0.2";
/// The gateway's address on that side.
const GATEWAY: &str = "10.99.0.1";
/// The gateway's address outside, which it has again after a restart.
pub(super) const GATEWAY_OUTSIDE: &str = "10.77.0.251";
/// What a shell does until it holds, for two minutes at most.
const LIMIT: u32 = 1200;

/// The function of a machine.
pub(super) fn purpose(part: NasPart) -> &'static str {
    match part {
        NasPart::Storage => "offers three disks",
        NasPart::Raid => "RAID 5 over them",
        NasPart::Files => "ext4 and the kernel's NFS server",
        NasPart::Gateway => "forwards between the network outside and the one inside",
        NasPart::All => "disks, RAID 5, ext4 and the kernel's NFS server",
        NasPart::Client => "mounts by NFS 4.2",
    }
}

fn wait_until(condition: &str) -> String {
    format!("n=0; until {condition}; do sleep 0.1; n=$((n+1)); [ $n -lt {LIMIT} ] || exit 1; done; ")
}

pub(super) fn wait_for_disks(disks: usize) -> String {
    let last = ["vda", "vdb", "vdc"][disks.clamp(1, DISKS) - 1];
    wait_until(&format!("[ -b /dev/{last} ]"))
}

/// Makes or assembles `/dev/md0`.
pub(super) fn raid(devices: &str, is_new: bool) -> String {
    // The disks are zeroes, so their parity is right.
    let line = if is_new {
        format!(
            "mdadm --create /dev/md0 --level=5 --raid-devices={DISKS} --chunk=64 --bitmap=internal --assume-clean --run {devices}"
        )
    } else {
        format!("mdadm --assemble --run --force /dev/md0 {devices}")
    };
    format!("mkdir -p /run/mdadm; {line} > /tmp/mdadm.log 2>&1 || {{ cat /tmp/mdadm.log; exit 1; }}")
}

/// A file system on a device, and the NFS server for it.
pub(super) fn files(device: &str, is_new: bool) -> String {
    let mut line = String::new();
    if is_new {
        let _ = write!(line, "/bin/mke2fs -q -F -t ext4 -E lazy_itable_init=0 {device} || exit 1; ");
    }
    let _ = writeln!(line, "mkdir -p {MOUNT}; mount -t ext4 {device} {MOUNT} || exit 1");
    line + &nfs_server(MOUNT)
}

/// Lines for the shell of a machine that start the kernel's NFS server for a directory. The machine has the module `nfsd` and the
/// [programs](super::NFS_SERVER).
pub fn nfs_server(folder: &str) -> String {
    format!(
        "\
mkdir -p /var/lib/nfs/v4recovery /etc
mount -t nfsd nfsd /proc/fs/nfsd || exit 1
echo '{folder} *(rw,no_root_squash,no_subtree_check,insecure,fsid=0)' > /etc/exports
: > /var/lib/nfs/etab; : > /var/lib/nfs/rmtab
printf 'tcp tpi_cots_ord v inet tcp - -\\n' > /etc/netconfig
printf 'nfs 2049/tcp\\n' > /etc/services
printf 'tcp 6 TCP\\n' > /etc/protocols
echo 10 > /proc/fs/nfsd/nfsv4leasetime && echo 10 > /proc/fs/nfsd/nfsv4gracetime || exit 1
exportfs -ar || exit 1
rpc.mountd -N 3 > /tmp/mountd.log 2>&1 || {{ cat /tmp/mountd.log; exit 1; }}
rpc.nfsd -N 3 4 > /tmp/nfsd.log 2>&1 || {{ cat /tmp/nfsd.log; exit 1; }}
"
    )
}

/// The options by which the kernel mounts NFS 4.2, without a helper of user space. `own` is the client's address.
pub fn nfs_options(server: &str, own: &str) -> String {
    format!("vers=4.2,proto=tcp,addr={server},clientaddr={own},hard,timeo=50")
}

/// The side of the gateway that is inside, on a card that may still be coming.
pub(super) fn gateway(card: &str) -> String {
    let arrives = wait_until(&format!("[ -e /sys/class/net/{card} ]"));
    format!(
        "{arrives}ip address add {GATEWAY}/24 dev {card}; ip link set {card} up
ip address add {GATEWAY_OUTSIDE}/24 dev eth0
arping -q -c 1 -A -I eth0 {GATEWAY_OUTSIDE} || true
echo 1 > /proc/sys/net/ipv4/ip_forward
for each in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $each; done"
    )
}

/// The card of the machine with the file system.
pub(super) fn inside(card: &str) -> String {
    let arrives = wait_until(&format!("[ -e /sys/class/net/{card} ]"));
    format!(
        "{arrives}ip address add {INSIDE}/24 dev {card}; ip link set {card} up
ip route add 10.77.0.0/24 via {GATEWAY} 2> /dev/null || ip route replace 10.77.0.0/24 via {GATEWAY}
true"
    )
}

/// Mounts the appliance on the client. A gateway is on the way, or none.
pub(super) fn mount(server: &str, own: &str, gateway: Option<&str>) -> String {
    let route = gateway.map(|gateway| format!("ip route add 10.99.0.0/24 via {gateway}; ")).unwrap_or_default();
    let reached = wait_until(&format!("ping -c 1 -W 1 {server} > /dev/null"));
    let options = nfs_options(server, own);
    let mounted = wait_until(&format!("mount {MOUNT} 2> /tmp/mount.log"));
    // IOZone mounts it again by this line.
    let table = format!("mkdir -p {MOUNT} /etc; echo '{server}:/ {MOUNT} nfs4 {options} 0 0' > /etc/fstab; ");
    // Until its time for clients that were there before is over, the server lets no file be opened.
    format!("{table}{route}{reached}{mounted}touch {MOUNT}/ready && rm {MOUNT}/ready")
}

/// Offers a device as `DOMAIN:disk`, and waits until it is offered.
pub(super) fn export(domain: &str, device: &str) -> String {
    let log = format!("/tmp/{domain}.log");
    let offered = wait_until(&format!("grep -q exporting {log}"));
    // The disk is one of a machine that was killed: its domain may still be in the directory for a moment.
    format!(
        ": > {log}; (until partywall blk export disk {device} --domain {domain} >> {log} 2>&1; do sleep 0.2; done) & {offered}"
    )
}

pub(super) fn nbd_server(devices: &[&str]) -> String {
    let mut config = String::from("[generic]\\n");
    for (number, device) in devices.iter().enumerate() {
        let _ = write!(config, "[d{number}]\\nexportname={device}\\nflush=true\\nfua=true\\n");
    }
    format!(
        "printf '{config}' > /tmp/nbd.conf; nbd-server -C /tmp/nbd.conf -p /tmp/nbd.pid || exit 1; {}",
        wait_until("grep -q ':2A39 ' /proc/net/tcp /proc/net/tcp6")
    )
}

pub(super) fn nbd_clients(server: &str, disks: usize) -> String {
    let reached = wait_until(&format!("ping -c 1 -W 1 {server} > /dev/null"));
    let one = |number| format!("/bin/nbd-client -N d{number} {server} /dev/nbd{number} -b 4096 > /dev/null 2>&1");
    let all: String = (0..disks).map(|number| wait_until(&one(number))).collect();
    format!("{reached}{all}")
}
