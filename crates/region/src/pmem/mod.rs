//! Windows: memory of one virtual machine that it alone can write, and that another, or the host, can read (protocol V1).
//!
//! On the host a window is a file ([`WindowFile`]). QEMU shows it to its owner as a writable `virtio-pmem` device and to the
//! peer as a read-only `nvdimm`, and a stock kernel in the guest makes `/dev/dax*` of either ([`dax`]). Wherever it is seen
//! from, it is a [`Window`], and regions are carved out of it ([`Space`]) that are as good as a sealed memfd each: the hypervisor,
//! instead of a seal, keeps the peer from writing. A window of a group's member is mapped whole, where all members map it
//! ([`Joint`]).
//!
//! ```text
//!   host file    | info block | header | region | region | free ...     |
//!   owner's dax               | header | region | region | free ...     |  read-write
//!   peer's dax                | header | region | region | free ...     |  read-only
//! ```

mod carve;
pub mod dax;
mod file;
mod joint;
mod space;
mod speed;
mod view;

pub use carve::Carve;
pub use file::{WindowFile, WindowSpec};
pub use joint::{Joint, OwnSeat, OwnSpan};
pub use partywall_shm::window::{Header, WindowId};
pub use space::Space;
pub use speed::UNCACHED;
pub use view::Window;
