//! Windows: memory of one virtual machine that it alone can write, and that another, or the host, can read (protocol V1).
//!
//! On the host a window is a file ([`WindowFile`]). QEMU shows it to its owner as a writable `virtio-pmem` device and to the
//! peer as a read-only `nvdimm`, and a stock kernel in the guest makes `/dev/dax*` of either ([`dax`]); or, in machines without room for
//! these, it is the memory of a PCI device ([`bar`]). Wherever it is seen
//! from, it is a [`Window`], and regions are carved out of it ([`Space`]) that are as good as a sealed memfd each: the hypervisor,
//! instead of a seal, keeps the peer from writing. A window of a group's member is mapped whole, where all members map it
//! ([`Joint`]).
//!
//! ```text
//!   host file    | info block | header | region | region | free ...     |
//!   owner's dax               | header | region | region | free ...     |  read-write
//!   peer's dax                | header | region | region | free ...     |  read-only
//! ```

mod access;
mod carve;
pub mod dax;
mod file;
mod joint;
pub mod memory;
mod space;
mod speed;
mod view;

pub use access::let_in;
pub use carve::Carve;
pub use file::{WindowFile, WindowSpec};
pub use joint::{Joint, OwnSeat, OwnSpan};
pub use partywall_protocol::window::{Header, WindowId};
pub use space::Space;
pub use speed::UNCACHED;
pub use view::Window;

use crate::bar;
use dax::DaxError;

/// Opens the window with this id in a guest, for writing if it is one's own, whatever device shows it.
pub fn find(id: WindowId, writable: bool) -> Result<Window, DaxError> {
    match dax::find(id, writable) {
        Err(absent @ DaxError::Absent { .. }) => bar::find(id, writable)?.ok_or(absent),
        found => found,
    }
}
