//! The two probes that no safe call can make: a mapping of a file, and a question to KVM.

#![expect(unsafe_code, reason = "mmap and KVM's ioctl have no safe form; nothing is read or written through either")]

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode};
use rustix::mm::{MapFlags, ProtFlags};

/// Whether the first page of `file` can be mapped shared, for reading or also for writing. It is unmapped at once.
pub(super) fn try_map(file: impl AsFd, len: usize, write: bool) -> Result<(), Errno> {
    let access = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: with a null address the kernel chooses a free range, so that no existing mapping is touched.
    let at = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
    // SAFETY: exactly the range that the call above has just made, without pointers into it.
    unsafe { rustix::mm::munmap(at, len) }
}

/// `KVM_CREATE_VM` for the default machine type: no argument, answers with a descriptor.
struct CreateVm;

/// `_IO(KVMIO, 0x01)` of linux/kvm.h, the same on every architecture that has KVM with this encoding of ioctls.
const KVM_CREATE_VM: Opcode = ioctl::opcode::none(0xAE, 0x01);

// SAFETY: KVM_CREATE_VM takes an integer by value (0), so that the kernel follows no pointer, and returns a new
// descriptor that nobody else owns.
unsafe impl Ioctl for CreateVm {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        KVM_CREATE_VM
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        ptr::null_mut()
    }

    // SAFETY: called by `ioctl` alone, with what the kernel returned for `KVM_CREATE_VM`.
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call succeeded, so that `out` is a descriptor which the kernel has made for this call alone.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// Whether a virtual machine can be made. It is gone again at once.
pub(super) fn try_kvm(kvm: impl AsFd) -> Result<(), Errno> {
    // SAFETY: the caller's descriptor may be of any file: a driver that is not KVM answers ENOTTY, or, for a type
    // byte that is reserved for KVM (0xAE), nothing else; the argument is no pointer.
    unsafe { ioctl::ioctl(kvm, CreateVm) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_other_than_kvm_is_recognised() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(try_kvm(&null), Err(Errno::NOTTY));
    }

    #[test]
    fn file_open_for_reading_cannot_be_mapped_for_writing() {
        let exe = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(try_map(&exe, 4096, false), Ok(()));
        assert_eq!(try_map(&exe, 4096, true), Err(Errno::ACCESS));
    }
}
