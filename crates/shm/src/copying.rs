//! The instructions that copy bytes while a peer may be changing them.
//!
//! A processor copies fastest with the `memcpy` of its C library. An emulated processor (QEMU without KVM) does not. It turns each
//! 16-byte vector move into two loads, two stores and a detour through its own memory, and executes `rep movs` byte by byte or word by
//! word. There 8-byte moves of ordinary registers are twice as fast, eight loads before eight stores, because pages of source and
//! destination that share a place in the emulator's table of pages then drive each other out once for 64 bytes.
//!
//! Other versions of QEMU may differ, so where the processor says that it is emulated, both ways are tried once.
#![expect(unsafe_code, reason = "copies of memory that may be changing, which the compiler must not look into")]

/// Copies `n` bytes that may be changing while they are read.
///
/// # Safety
/// `src..src+n` readable, `dst..dst+n` writable, with no other access from this process during the copy, not overlapping.
#[inline]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, n: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's contract is that of all three.
    unsafe {
        if n >= x86::LONG && x86::by_words() { x86::words(dst, src, n) } else { x86::library(dst, src, n) }
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    // SAFETY: the same contract.
    unsafe {
        atomic(dst, src, n);
    }
}

/// Copies `n` bytes that do not change to memory that a peer may be reading.
///
/// # Safety
/// As for [`copy`], and the source does not change.
#[inline]
pub(crate) unsafe fn copy_still(dst: *mut u8, src: *const u8, n: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if n >= x86::LONG && x86::by_words() {
        // SAFETY: the same contract.
        unsafe { x86::words(dst, src, n) };
        return;
    }
    // SAFETY: the same contract. Short copies of known length become single instructions.
    unsafe { core::ptr::copy_nonoverlapping(src, dst, n) };
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use core::arch::x86_64::{__cpuid, _rdtsc};
    use core::sync::atomic::{AtomicU8, Ordering};

    /// Shorter copies are not worth a thought.
    pub(super) const LONG: usize = 512;
    /// The bytes that one turn of [`words`] copies.
    const BLOCK: usize = 64;
    /// The size and the number of the trial copies. The fastest trial counts, since an emulator translates the code at first and may be
    /// held up.
    const TRIAL: usize = 2 << 10;
    const TRIALS: u32 = 10;

    /// The method that was found to be faster, or [`UNKNOWN`].
    static FASTER: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 0;
    const LIBRARY: u8 = 1;
    const WORDS: u8 = 2;

    /// Whether long copies go by [`words`].
    #[inline]
    pub(super) fn by_words() -> bool {
        match FASTER.load(Ordering::Relaxed) {
            UNKNOWN => find_out(),
            faster => faster == WORDS,
        }
    }

    #[cold]
    fn find_out() -> bool {
        let words = is_emulated() && are_words_faster();
        // Threads that find out at the same time may differ for one copy, which does no harm.
        FASTER.store(if words { WORDS } else { LIBRARY }, Ordering::Relaxed);
        words
    }

    /// Whether the processor identifies itself as emulated.
    fn is_emulated() -> bool {
        const UNDER_A_HYPERVISOR: u32 = 1 << 31;
        const ITS_NAME: u32 = 0x4000_0000;
        if __cpuid(1).ecx & UNDER_A_HYPERVISOR == 0 {
            return false;
        }
        let name = __cpuid(ITS_NAME);
        [name.ebx, name.ecx, name.edx].map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
    }

    /// It allocates nothing: the first long copy of a process may be in a signal handler of a foreign program, or between `fork` and
    /// `exec`.
    #[inline(never)]
    fn are_words_faster() -> bool {
        let (from, mut to) = ([1; TRIAL], [0; TRIAL]);
        let (mut by_words, mut by_library) = (u64::MAX, u64::MAX);
        // In turns: whatever holds the processor up, or takes time to get going, does so for both.
        for _ in 0..TRIALS {
            by_words = by_words.min(time(words, &mut to, &from));
            by_library = by_library.min(time(library, &mut to, &from));
        }
        by_words < by_library
    }

    /// The time that a copy takes.
    ///
    /// There must be one copy of this code and of the functions it calls. An emulator translates code when it first reaches it, which
    /// takes fifty times as long as running it, so an unrolled loop would measure the translation of every turn.
    #[inline(never)]
    fn time(copy: unsafe fn(*mut u8, *const u8, usize), to: &mut [u8; TRIAL], from: &[u8; TRIAL]) -> u64 {
        let copy = core::hint::black_box(copy);
        // SAFETY: a counter may be read at any time; two arrays of that length are copied between.
        unsafe {
            let start = _rdtsc();
            copy(to.as_mut_ptr(), from.as_ptr(), TRIAL);
            _rdtsc().wrapping_sub(start)
        }
    }

    /// By the C library.
    ///
    /// # Safety
    /// As for [`super::copy`].
    #[inline]
    pub(super) unsafe fn library(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the signature that the C standard gives it.
        unsafe extern "C" {
            fn memcpy(dst: *mut u8, src: *const u8, n: usize) -> *mut u8;
        }
        // SAFETY: the assembly calls `memcpy` by the C ABI with valid, disjoint ranges (the caller's contract); the stack is
        // aligned for a call at the start of an asm block without `nostack`, and `clobber_abi` names all that a call may
        // change. What the compiler knows of the block is only that it may write memory, so it can assume nothing of `src`.
        unsafe {
            core::arch::asm!(
                "call {memcpy}",
                memcpy = sym memcpy,
                inout("rdi") dst => _,
                inout("rsi") src => _,
                inout("rdx") n => _,
                clobber_abi("C"),
            );
        }
    }

    /// By eight words at a time.
    ///
    /// # Safety
    /// As for [`super::copy`].
    pub(super) unsafe fn words(dst: *mut u8, src: *const u8, n: usize) {
        let rest = n % BLOCK;
        let (mut to, mut from) = (dst, src);
        if n >= BLOCK {
            // SAFETY: the block reads and writes `n - rest` bytes from `src` and `dst` on, within the caller's ranges, and
            // changes the registers that it names and the flags; it uses no stack. Afterwards `to` and `from` are behind them.
            unsafe {
                core::arch::asm!(
                    "2:",
                    "mov {a}, [{from}]",
                    "mov {b}, [{from} + 8]",
                    "mov {c}, [{from} + 16]",
                    "mov {d}, [{from} + 24]",
                    "mov {e}, [{from} + 32]",
                    "mov {f}, [{from} + 40]",
                    "mov {g}, [{from} + 48]",
                    "mov {h}, [{from} + 56]",
                    "mov [{to}], {a}",
                    "mov [{to} + 8], {b}",
                    "mov [{to} + 16], {c}",
                    "mov [{to} + 24], {d}",
                    "mov [{to} + 32], {e}",
                    "mov [{to} + 40], {f}",
                    "mov [{to} + 48], {g}",
                    "mov [{to} + 56], {h}",
                    "add {from}, 64",
                    "add {to}, 64",
                    "sub {left}, 64",
                    "jnz 2b",
                    from = inout(reg) from,
                    to = inout(reg) to,
                    left = inout(reg) n - rest => _,
                    a = out(reg) _,
                    b = out(reg) _,
                    c = out(reg) _,
                    d = out(reg) _,
                    e = out(reg) _,
                    f = out(reg) _,
                    g = out(reg) _,
                    h = out(reg) _,
                    options(nostack),
                );
            }
        }
        // SAFETY: the rest of the caller's ranges.
        unsafe { library(to, from, rest) };
    }

    #[cfg(all(test, not(loom)))]
    mod tests {
        use super::*;
        use alloc::vec;
        use alloc::vec::Vec;

        #[test]
        fn word_copy_is_exact_for_every_length_and_alignment() {
            let source: Vec<u8> = (0..1200u32).map(|i| (i * 7 + (i >> 8)) as u8).collect();
            for len in (0..200).chain([255, 256, 257, 511, 512, 513, 1023, 1024, 1100]) {
                for from in 0..9 {
                    let mut to = vec![0xEE; len + 2];
                    // SAFETY: both vectors are long enough.
                    unsafe { words(to.as_mut_ptr().add(1), source.as_ptr().add(from), len) };
                    assert_eq!(&to[1..=len], &source[from..from + len]);
                    assert_eq!((to[0], to[len + 1]), (0xEE, 0xEE), "nothing beside it was touched");
                }
            }
        }

        #[test]
        fn copy_routine_is_chosen_once_and_memcpy_unless_emulated() {
            let chosen = find_out();
            assert!(is_emulated() || !chosen);
            assert_eq!(by_words(), chosen);
            // Whichever is faster here, to find out copies what it should.
            let _ = are_words_faster();
        }
    }
}

/// Word by word, each an atomic load.
///
/// # Safety
/// As for [`copy`].
#[cfg(any(not(target_arch = "x86_64"), miri))]
unsafe fn atomic(dst: *mut u8, src: *const u8, n: usize) {
    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    let mut i = 0;
    while i < n {
        // SAFETY: `i` stays below `n`, so all addresses are in the caller's ranges; words are loaded only at
        // aligned addresses with eight bytes left. Atomic loads may race with any store of a peer.
        unsafe {
            let from = src.add(i);
            if from.addr() % 8 == 0 && n - i >= 8 {
                let word = AtomicU64::from_ptr(from.cast_mut().cast()).load(Ordering::Relaxed);
                dst.add(i).cast::<u64>().write_unaligned(word);
                i += 8;
            } else {
                dst.add(i).write(AtomicU8::from_ptr(from.cast_mut()).load(Ordering::Relaxed));
                i += 1;
            }
        }
    }
}
