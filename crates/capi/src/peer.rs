//! The other side of a connection, as C sees it.
#![expect(unsafe_code, reason = "writes a structure that C passes")]

use crate::failure::CallFailure;
use partywall::{PeerInfo, User};
use std::ffi::{CString, c_char};

/// `pw_peer` of the header.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawPeer {
    /// Bytes of the structure as the program knows it.
    pub size: u32,
    /// The number of its domain.
    pub domain_id: u32,
    /// The name of its domain. It lives as long as the connection.
    pub domain: *const c_char,
    /// The service. It lives as long as the connection.
    pub service: *const c_char,
    /// Its domain's epoch.
    pub epoch: u64,
    /// Its user on the host or in its container, or -1.
    pub uid: i64,
    /// Its process, or -1.
    pub pid: i64,
    /// Its user on the host if the broker is certain of it, or -1.
    pub certain_uid: i64,
}

/// Bytes of the first version's structure.
const FIRST: usize = 48;

/// The texts of a connection's peer, each with a terminating zero.
#[derive(Debug)]
pub struct KeptPeer {
    info: PeerInfo,
    domain: CString,
    service: CString,
}

impl KeptPeer {
    /// Keeps the texts. The broker has checked names, so there is no zero in them.
    pub fn new(info: PeerInfo) -> Self {
        let domain = CString::new(info.name.as_str()).unwrap_or_default();
        let service = CString::new(info.service.as_str()).unwrap_or_default();
        Self { info, domain, service }
    }

    /// Copies the facts about the peer to the caller's structure.
    ///
    /// A program that knows an earlier version of the structure gets as many of the fields as that has.
    ///
    /// # Safety
    /// The pointer is null, or points to as many bytes as its first field says.
    pub unsafe fn describe(&self, to: *mut RawPeer) -> Result<(), CallFailure> {
        if to.is_null() {
            return Err(CallFailure::invalid("peer is NULL: pass the address of a pw_peer"));
        }
        // SAFETY: the caller's promise: there is at least the first field.
        let size = unsafe { (&raw const (*to).size).read() };
        if (size as usize) < FIRST {
            return Err(CallFailure::invalid("pw_peer has no size: initialise it by PW_PEER_INIT"));
        }
        let number = |number: Option<u32>| number.map_or(-1, i64::from);
        let raw = RawPeer {
            size,
            domain_id: self.info.domain_id,
            domain: self.domain.as_ptr(),
            service: self.service.as_ptr(),
            epoch: self.info.epoch,
            uid: number(self.info.uid()),
            pid: number(self.info.pid),
            certain_uid: number(self.info.certain_user().and_then(User::uid)),
        };
        let known = size_of::<RawPeer>().min(size as usize);
        // SAFETY: `known` is at most `size`, and the caller promises that `size` bytes are there. It is at most the size of `raw`, which is memory of
        // this function, so the two do not overlap.
        unsafe { (&raw const raw).cast::<u8>().copy_to_nonoverlapping(to.cast::<u8>(), known) };
        Ok(())
    }
}
