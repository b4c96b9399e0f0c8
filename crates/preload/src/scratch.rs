//! Memory for the length of one call, where the program's allocator may not be called.
#![expect(unsafe_code, reason = "maps memory, and fills it")]

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr;

/// Values that fit on the stack.
const FEW: usize = 17;

/// Lends memory for `n` values: on the stack while they are few, and mapped otherwise.
pub(crate) fn with_memory<T: Copy, R>(
    n: usize,
    value: T,
    what: impl FnOnce(&mut [T]) -> Result<R, Errno>,
) -> Result<R, Errno> {
    if n <= FEW {
        let mut few = [value; FEW];
        return what(&mut few[..n]);
    }
    let bytes = n.checked_mul(size_of::<T>()).ok_or(Errno::NOMEM)?;
    // SAFETY: new memory at an address that the kernel chooses.
    let map = unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
    let values = map.cast::<T>();
    for i in 0..n {
        // SAFETY: inside the mapping, which is aligned for anything.
        unsafe { values.add(i).write(value) };
    }
    // SAFETY: written above, and ours alone until it is unmapped.
    let result = what(unsafe { std::slice::from_raw_parts_mut(values, n) });
    // SAFETY: mapped above, and not used any more.
    let _ = unsafe { munmap(map, bytes) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_memory_holds_the_value_on_stack_and_mapped() {
        for n in [0, 1, FEW, FEW + 1, 5000] {
            let sum = with_memory(n, 3u32, |values| {
                assert_eq!(values.len(), n);
                Ok(values.iter().sum::<u32>())
            });
            assert_eq!(sum, Ok(3 * n as u32));
        }
        assert_eq!(with_memory(usize::MAX, 0u64, |_| Ok(())), Err(Errno::NOMEM));
    }
}
