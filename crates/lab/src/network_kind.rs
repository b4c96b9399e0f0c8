//! The kind of a network between guests.

use std::fmt;

/// How frames get from one guest to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkKind {
    /// By tap devices on a bridge of the host's kernel, whose `vhost-net` moves them if `vhost`.
    Bridge {
        /// The host has `/dev/vhost-net`.
        vhost: bool,
    },
    /// From QEMU to QEMU, by datagrams of UNIX sockets. There are two guests at most.
    Sockets,
}

impl fmt::Display for NetworkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge { vhost: false } => "virtio-net, tap and bridge",
            Self::Bridge { vhost: true } => "virtio-net with vhost, tap and bridge",
            Self::Sockets => "virtio-net, sockets between the QEMUs",
        })
    }
}
