//! The commands of the system call bpf(2) that the record needs. Neither the C library nor rustix has functions for them.
#![expect(unsafe_code, reason = "a system call that takes addresses as numbers")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::program::Instruction;

/// Commands (`enum bpf_cmd`).
const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP: libc::c_int = 1;
const PROGRAM_LOAD: libc::c_int = 5;
const PIN: libc::c_int = 6;
const GET_PINNED: libc::c_int = 7;
const GET_INFO: libc::c_int = 15;
const TYPES_LOAD: libc::c_int = 18;
const MAP_FREEZE: libc::c_int = 22;
const LINK_CREATE: libc::c_int = 28;

/// `BPF_MAP_TYPE_SK_STORAGE`, and the flag that such maps need.
const SOCKET_STORAGE: u32 = 24;
const NO_PREALLOCATION: u32 = 1;
/// `BPF_PROG_TYPE_SOCK_OPS`, and where such a program is attached (`BPF_CGROUP_SOCK_OPS`).
const SOCKET_OPERATIONS: u32 = 13;
const AT_SOCKET_OPERATIONS: u32 = 3;
/// `BPF_LINK_TYPE_CGROUP`.
const CGROUP_LINK: u32 = 3;
/// `BPF_F_RDONLY`.
const READ_ONLY: u32 = 1 << 3;
/// Bytes of a key (a descriptor), and of a value.
const KEY_SIZE: u32 = 4;
const VALUE_SIZE: u32 = 8;

/// The types of key and value, in the kernel's type format (BTF), which a map of this kind must have: an `int`, and an integer of 64 bits.
fn types() -> Vec<u8> {
    const NAMES: &[u8; 10] = b"\0int\0long\0";
    // For each: offset of its name, kind (1: integer), size, and encoding with bits.
    const INTEGERS: [[u32; 4]; 2] = [[1, 1 << 24, KEY_SIZE, 1 << 24 | 32], [5, 1 << 24, VALUE_SIZE, 64]];
    // Length of the header, then offset and length of the types and of the names.
    const SIZES: [u32; 5] = [24, 0, 32, 32, 10];
    let mut bytes = 0xeb9f_u16.to_ne_bytes().to_vec();
    // The version, and no flags.
    bytes.extend([1, 0]);
    bytes.extend(SIZES.iter().chain(INTEGERS.as_flattened()).flat_map(|word| word.to_ne_bytes()));
    bytes.extend(NAMES);
    bytes
}

#[repr(C)]
struct MapAttributes {
    kind: u32,
    key_size: u32,
    value_size: u32,
    most_entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
    device: u32,
    types: u32,
    key_type: u32,
    value_type: u32,
}

#[repr(C)]
struct ProgramAttributes {
    kind: u32,
    instructions: u32,
    code: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    device: u32,
    attached_at: u32,
}

#[repr(C)]
struct TypesAttributes {
    types: u64,
    log: u64,
    size: u32,
    log_size: u32,
}

#[repr(C)]
struct LinkAttributes {
    program: u32,
    target: u32,
    attached_at: u32,
    flags: u32,
}

#[repr(C)]
struct PinAttributes {
    path: u64,
    descriptor: u32,
    flags: u32,
}

#[repr(C)]
struct ElementAttributes {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct FreezeAttributes {
    map: u32,
}

#[repr(C)]
struct InfoAttributes {
    descriptor: u32,
    size: u32,
    info: u64,
}

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    kind: u32,
    number: u32,
    key_size: u32,
    value_size: u32,
}

/// `struct bpf_link_info`, of a link to a cgroup.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    number: u32,
    program: u32,
    padding: u32,
    cgroup: u64,
    attached_at: u32,
    end: u32,
}

/// A structure of which every byte belongs to a field, as `union bpf_attr` begins for a command.
///
/// # Safety
/// It has no padding, and the addresses in it are valid for what the command that it is for does with them.
unsafe trait Attributes {}

// SAFETY: (all) the fields follow each other without gaps, at multiples of their sizes, and end at one of the largest size. Each function below
// takes the addresses from what it has borrowed for the time of the call.
unsafe impl Attributes for MapAttributes {}
// SAFETY: as above.
unsafe impl Attributes for ProgramAttributes {}
// SAFETY: as above.
unsafe impl Attributes for TypesAttributes {}
// SAFETY: as above.
unsafe impl Attributes for LinkAttributes {}
// SAFETY: as above.
unsafe impl Attributes for PinAttributes {}
// SAFETY: as above.
unsafe impl Attributes for ElementAttributes {}
// SAFETY: as above.
unsafe impl Attributes for FreezeAttributes {}
// SAFETY: as above.
unsafe impl Attributes for InfoAttributes {}

fn bpf<A: Attributes>(command: libc::c_int, mut attributes: A) -> io::Result<RawFd> {
    // SAFETY: the kernel reads as many bytes as the structure has, all of which are initialised, and may write to those (`GET_INFO` stores a
    // length). It uses the addresses in it as `Attributes` requires.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(&mut attributes),
            libc::c_long::from(size_of::<A>() as i32),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// A command that answers with a descriptor.
fn descriptor<A: Attributes>(command: libc::c_int, attributes: A) -> io::Result<OwnedFd> {
    // SAFETY: the kernel made it for this process just now.
    bpf(command, attributes).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>() as u64
}

/// The elements of something that is known to be small.
fn len<T>(of: &[T]) -> u32 {
    u32::try_from(of.len()).unwrap_or(u32::MAX)
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Makes a map that has a value for each socket, as long as the socket lives. Programs alone can write it from then on: no process, with whatever
/// descriptor.
///
/// # Errors
/// The kernel's: without `CAP_BPF`, `EPERM`.
pub(super) fn make_socket_map(name: [u8; 16]) -> io::Result<OwnedFd> {
    let types = types();
    let attributes = TypesAttributes { types: address(&types[..]), log: 0, size: len(&types), log_size: 0 };
    let types = descriptor(TYPES_LOAD, attributes)?;
    let attributes = MapAttributes {
        kind: SOCKET_STORAGE,
        key_size: KEY_SIZE,
        value_size: VALUE_SIZE,
        most_entries: 0,
        flags: NO_PREALLOCATION,
        inner: 0,
        node: 0,
        name,
        device: 0,
        types: number(types.as_fd()),
        key_type: 1,
        value_type: 2,
    };
    let map = descriptor(MAP_CREATE, attributes)?;
    bpf(MAP_FREEZE, FreezeAttributes { map: number(map.as_fd()) })?;
    Ok(map)
}

/// Loads a program that runs at operations of sockets.
///
/// # Errors
/// The kernel's: without `CAP_BPF` and `CAP_NET_ADMIN`, `EPERM`. What its verifier says, if it does not take the program.
pub(super) fn load_program(name: [u8; 16], code: &[Instruction]) -> io::Result<OwnedFd> {
    let mut log = vec![0_u8; 1 << 16];
    let attributes = ProgramAttributes {
        kind: SOCKET_OPERATIONS,
        instructions: len(code),
        code: address(code),
        licence: address(c"MIT"),
        log_level: 1,
        log_size: len(&log),
        log: std::ptr::from_mut(&mut log[..]).cast::<u8>() as u64,
        kernel: 0,
        flags: 0,
        name,
        device: 0,
        attached_at: AT_SOCKET_OPERATIONS,
    };
    descriptor(PROGRAM_LOAD, attributes).map_err(|e| {
        let said = std::ffi::CStr::from_bytes_until_nul(&log).map(|said| said.to_string_lossy().into_owned());
        match said.as_deref().map(str::trim_end) {
            Ok("") | Err(_) => e,
            Ok(said) => io::Error::new(e.kind(), format!("{e}: {said}")),
        }
    })
}

/// Attaches such a program to all sockets of a cgroup and of those in it, for as long as the link lives that this returns. It runs beside
/// programs that others attach.
///
/// # Errors
/// The kernel's: without `CAP_NET_ADMIN`, `EPERM`.
pub(super) fn attach(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (program, target) = (number(program), number(cgroup));
    descriptor(LINK_CREATE, LinkAttributes { program, target, attached_at: AT_SOCKET_OPERATIONS, flags: 0 })
}

/// Gives a map or link a path in a file system of type `bpf`, which keeps it.
///
/// # Errors
/// The kernel's: in another file system, `EPERM`.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf(PIN, PinAttributes { path: address(path.as_bytes_with_nul()), descriptor: number(object), flags: 0 }).map(drop)
}

fn pinned(path: &Path, flags: u32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    descriptor(GET_PINNED, PinAttributes { path: address(path.as_bytes_with_nul()), descriptor: 0, flags })
}

/// Opens the map at a path, for reading, and returns its number. Takes no capability.
///
/// # Errors
/// The kernel's; `InvalidData` for anything else than a map of [`make_socket_map`].
pub(super) fn pinned_socket_map(path: &Path) -> io::Result<(OwnedFd, u32)> {
    let map = pinned(path, READ_ONLY)?;
    let mut info = MapInfo::default();
    read_info(map.as_fd(), &mut info)?;
    match (info.kind, info.key_size, info.value_size) {
        (SOCKET_STORAGE, KEY_SIZE, VALUE_SIZE) => Ok((map, info.number)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no map of this version")),
    }
}

/// Opens the link at a path, which must be of [`attach`]. Takes no capability.
///
/// # Errors
/// The kernel's; `InvalidData` for anything else.
pub(super) fn pinned_link(path: &Path) -> io::Result<OwnedFd> {
    let link = pinned(path, 0)?;
    match is_attached(link.as_fd())? {
        true => Ok(link),
        false => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "its program is not attached to the sockets of a cgroup"))
        }
    }
}

/// Whether a link attaches a program to the operations of a cgroup's sockets, now. An administrator may detach it, and a cgroup may end.
///
/// # Errors
/// The kernel's.
pub(super) fn is_attached(link: BorrowedFd<'_>) -> io::Result<bool> {
    let mut info = LinkInfo::default();
    read_info(link, &mut info)?;
    Ok((info.kind, info.attached_at) == (CGROUP_LINK, AT_SOCKET_OPERATIONS) && info.cgroup != 0)
}

/// A structure that the kernel fills with facts about an object.
///
/// # Safety
/// Any bytes are valid for it.
unsafe trait Info {}

// SAFETY: it has integers alone.
unsafe impl Info for MapInfo {}
// SAFETY: as above.
unsafe impl Info for LinkInfo {}

fn read_info<I: Info>(of: BorrowedFd<'_>, info: &mut I) -> io::Result<()> {
    let attributes =
        InfoAttributes { descriptor: number(of), size: size_of::<I>() as u32, info: std::ptr::from_mut(info) as u64 };
    bpf(GET_INFO, attributes).map(drop)
}

/// The value of a socket in a map of [`pinned_socket_map`] or [`make_socket_map`].
///
/// # Errors
/// The kernel's: `ENOENT` if it has none.
pub(super) fn look_up(map: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> io::Result<u64> {
    let key: RawFd = socket.as_raw_fd();
    let mut value = 0_u64;
    let attributes = ElementAttributes {
        map: number(map),
        padding: 0,
        key: address(&key),
        // The kernel writes as many bytes as a value of the map has, which are those of `value`.
        value: std::ptr::from_mut(&mut value) as u64,
        flags: 0,
    };
    bpf(MAP_LOOKUP, attributes)?;
    Ok(value)
}

#[cfg(test)]
pub(super) use attack::{detach, write};

/// What a process could do that has a descriptor.
#[cfg(test)]
mod attack {
    use super::*;

    const MAP_UPDATE: libc::c_int = 2;
    const LINK_DETACH: libc::c_int = 34;

    #[repr(C)]
    struct DetachAttributes {
        link: u32,
    }
    // SAFETY: it is one integer, which is no address.
    unsafe impl Attributes for DetachAttributes {}

    pub(in super::super) fn write(map: BorrowedFd<'_>, socket: BorrowedFd<'_>, value: u64) -> io::Result<()> {
        let (key, value): (RawFd, u64) = (socket.as_raw_fd(), value);
        let (key, value) = (address(&key), address(&value));
        bpf(MAP_UPDATE, ElementAttributes { map: number(map), padding: 0, key, value, flags: 0 }).map(drop)
    }

    pub(in super::super) fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
        bpf(LINK_DETACH, DetachAttributes { link: number(link) }).map(drop)
    }
}
