//! The input is what a peer committed to a message ring (protocol D): every record lies within it, or it is corrupt.
#![no_main]

use partywall_shm::record;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    // The first bytes say how large the ring is and what the channel allows; the rest is what is committed.
    let Some((&[size, allowed], mut committed)) = input.split_first_chunk() else { return };
    let longest = record::longest(8 << (size % 24)).min(u64::from(allowed) << (size / 24));
    while let Some(&header) = committed.first_chunk::<8>() {
        let available = committed.len() as u64;
        let word = u64::from_le_bytes(header);
        match record::parse(header, available, longest) {
            Ok(length) => {
                let length = u64::from(length);
                assert!(length == word && length <= longest, "a message of {length} where {longest} are allowed");
                let taken = record::footprint(length);
                assert!(taken >= record::HEADER + length && taken % 8 == 0 && taken <= available);
                assert_eq!(record::header(u32::try_from(length).expect("it came out of 32 bits")), header);
                committed = &committed[usize::try_from(taken).expect("no more than the input")..];
            }
            Err(_) => {
                // Said in other words: too long for the channel, for what is committed, or not a length at all.
                let fits = word <= longest && word.checked_add(15).is_some_and(|end| (end & !7) <= available);
                assert!(!fits || word > u64::from(u32::MAX), "{word} of {available} is refused");
                return;
            }
        }
    }
});
