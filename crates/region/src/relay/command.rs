//! What the owner of a relay tells it.

use super::DirectionWatch;
use super::core::LinkUse;
use super::doorbells::Doorbells;
use partywall_protocol::window::WindowId;
use rustix::fd::OwnedFd;

/// The commands that a relay takes.
#[derive(Debug)]
pub(super) enum RelayCommand {
    Link {
        id: u32,
        socket: OwnedFd,
        watch: Option<DirectionWatch>,
    },
    Doorbells(Doorbells),
    Window {
        id: WindowId,
        memory: OwnedFd,
    },
    Forget {
        id: WindowId,
    },
    Control(Vec<u8>),
    ControlWith {
        message: Vec<u8>,
        links: Vec<(u32, OwnedFd)>,
        carries: LinkUse,
    },
    ForgetLink {
        id: u32,
    },
    HangUp {
        id: u32,
    },
    HangUpAll,
    Leave,
    /// The owner has taken a notice that says that all links have ended.
    OwnerHeard,
    End,
}
