//! The eBPF program that the kernel runs when a TCP connection is established (`BPF_PROG_TYPE_SOCK_OPS` in bpf(2)). It stores the numbers
//! that the connection began with at the socket.
//!
//! It is written in instructions, because it has 23 of them and a compiler for it would be a dependency of every build. The layout of an
//! instruction is that of RFC 9669, section 3.

/// Operations of `struct bpf_sock_ops`: a connection of this side, and one that a listener got, is established.
const ACTIVE_ESTABLISHED: i32 = 4;
const PASSIVE_ESTABLISHED: i32 = 5;
/// Offsets in `struct bpf_sock_ops`.
const OP: i16 = 0;
const RCV_NXT: i16 = 100;
const SND_UNA: i16 = 108;
const BYTES_RECEIVED: i16 = 168;
const BYTES_ACKED: i16 = 176;
const SOCKET: i16 = 184;
/// The helper `bpf_sk_storage_get`, and its flag that makes storage where the socket has none.
const STORAGE_GET: i32 = 107;
const CREATE: i32 = 1;

/// Operation codes (RFC 9669, section 4 and 5).
const LOAD_U32: u8 = 0x61;
const LOAD_U64: u8 = 0x79;
const STORE_U64: u8 = 0x7b;
const LOAD_MAP: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_IMMEDIATE: u8 = 0xb7;
const SUBTRACT_U32: u8 = 0x1c;
const SHIFT_LEFT: u8 = 0x67;
const OR: u8 = 0x4f;
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// In the place of a source register: the immediate is the descriptor of a map.
const MAP_DESCRIPTOR: u8 = 1;

/// One instruction, as the kernel has it.
pub(super) type Instruction = [u8; 8];

const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
    let (offset, immediate) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
    [code, registers, offset[0], offset[1], immediate[0], immediate[1], immediate[2], immediate[3]]
}

/// The program that stores into the map with this descriptor. It stores one number: the first byte that was sent in the low half, and the first that
/// was received in the high half.
pub(super) fn recording_into(map: i32) -> [Instruction; 23] {
    [
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD_U32, 2, 6, OP, 0),
        instruction(JUMP_IF_EQUAL, 2, 0, 1, ACTIVE_ESTABLISHED),
        instruction(JUMP_UNLESS_EQUAL, 2, 0, 17, PASSIVE_ESTABLISHED),
        instruction(LOAD_U64, 2, 6, SOCKET, 0),
        instruction(JUMP_IF_EQUAL, 2, 0, 15, 0),
        // As `inspect::numbers` has them: the current numbers without the bytes that count.
        instruction(LOAD_U32, 7, 6, SND_UNA, 0),
        instruction(LOAD_U64, 1, 6, BYTES_ACKED, 0),
        instruction(SUBTRACT_U32, 7, 1, 0, 0),
        instruction(LOAD_U32, 8, 6, RCV_NXT, 0),
        instruction(LOAD_U64, 1, 6, BYTES_RECEIVED, 0),
        instruction(SUBTRACT_U32, 8, 1, 0, 0),
        instruction(SHIFT_LEFT, 8, 0, 0, 32),
        instruction(OR, 8, 7, 0, 0),
        instruction(LOAD_MAP, 1, MAP_DESCRIPTOR, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(MOVE_IMMEDIATE, 3, 0, 0, 0),
        instruction(MOVE_IMMEDIATE, 4, 0, 0, CREATE),
        instruction(CALL, 0, 0, 0, STORAGE_GET),
        instruction(JUMP_IF_EQUAL, 0, 0, 1, 0),
        // A socket that connects again has storage already: it is overwritten.
        instruction(STORE_U64, 0, 8, 0, 0),
        // All jumps to the end arrive here.
        instruction(MOVE_IMMEDIATE, 0, 0, 0, 1),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}
