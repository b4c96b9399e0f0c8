//! Sizes, rates and times as people write them.

/// Bytes in binary units: exact when it is a whole number of them.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let mut unit = 0;
    let mut value = n as f64;
    while unit + 1 < UNITS.len() && value >= 1024.0 {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Bytes per second in decimal units, with three digits.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    if bytes_per_second >= 1e9 {
        format!("{} GB/s", digits(bytes_per_second / 1e9))
    } else {
        format!("{} MB/s", digits(bytes_per_second / 1e6))
    }
}

/// A time, from nanoseconds, with three digits.
pub(crate) fn nanoseconds(ns: f64) -> String {
    if ns < 1e3 {
        format!("{ns:.0} ns")
    } else if ns < 1e6 {
        format!("{} us", digits(ns / 1e3))
    } else if ns < 1e9 {
        format!("{} ms", digits(ns / 1e6))
    } else {
        format!("{} s", digits(ns / 1e9))
    }
}

/// Three digits that matter.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.0995 => format!("{value:.2}"),
        0.0 => "0".into(),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_well() {
        assert_eq!(bytes(64), "64 B");
        assert_eq!(bytes(65536), "64 KiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(rate(14.26e9), "14.3 GB/s");
        assert_eq!(rate(60e6), "60.0 MB/s");
        assert_eq!(nanoseconds(329.4), "329 ns");
        assert_eq!(nanoseconds(10_400.0), "10.4 us");
        assert_eq!(nanoseconds(4.0e9), "4.00 s");
        assert_eq!(digits(0.0), "0");
    }
}
