//! The set-up of memory, in three parts.

use std::time::Duration;

use crate::{error::Result, report::metric::Metric, task::Figures};

/// Bytes of a page.
const PAGE: usize = 4096;

/// Touches each page, as a program does that fills a heap.
pub(crate) fn touch(bytes: &mut [u8]) {
    for page in bytes.chunks_mut(PAGE) {
        page[0] = page[0].wrapping_add(1);
    }
    std::hint::black_box(bytes);
}

/// The medians of several set-ups: until the call returned, until all pages were touched, and of reading by the other side.
pub(crate) fn samples(most: u64, mut one: impl FnMut() -> Result<[Duration; 3]>) -> Result<Figures> {
    let mut all = [const { Vec::new() }; 3];
    for _ in 0..most.max(1) {
        for (times, time) in all.iter_mut().zip(one()?) {
            times.push(time);
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    };
    let [set_up, touched, peer] = all.map(median);
    let mut figures = Figures::from([(Metric::Seconds, set_up), (Metric::MemorySeconds, touched)]);
    if peer > 0.0 {
        figures.insert(Metric::PeerSeconds, peer);
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_medians() {
        let mut times = [3, 1, 2].into_iter();
        let figures = samples(3, || {
            let time = Duration::from_secs(times.next().unwrap());
            Ok([time, time * 2, Duration::ZERO])
        });
        assert_eq!(figures.unwrap(), Figures::from([(Metric::Seconds, 2.0), (Metric::MemorySeconds, 4.0)]));
    }
}
