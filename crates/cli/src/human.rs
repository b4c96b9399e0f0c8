//! Sizes, durations and rates as people write and read them.

use std::time::Duration;

use indicatif::DecimalBytes;
pub(crate) use partywall_terminal::bytes;

/// Reads a duration: a plain number of seconds (`0.5`), or one with a unit (`50us`, `10ms`, `2s`, `1m`).
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) => {
            Duration::try_from_secs_f64(seconds).map_err(|e| format!("{e}; durations are not negative and fit 64 bits"))
        }
        Err(_) => humantime::parse_duration(text)
            .map_err(|_| "write seconds, or a number with us, ms, s or m, as in 50us".to_owned()),
    }
}

/// Reads the longest time to spin: 0, or a number with a unit (`50us`, `2ms`) up to an hour. A plain number could be one of microseconds.
pub(crate) fn parse_spin(text: &str) -> Result<Duration, String> {
    let spin = if text == "0" { Ok(Duration::ZERO) } else { humantime::parse_duration(text) };
    spin.ok()
        .filter(|spin| *spin <= Duration::from_secs(3600))
        .ok_or_else(|| "write 0, or a number with us, ms or s, as in 50us; at most 1h".to_owned())
}

/// Bytes per second in powers of ten, as networks and memory are measured: `3.20 GB/s`.
pub(crate) fn rate(n: u64, seconds: f64) -> String {
    if seconds <= 0.0 {
        return "-".into();
    }
    // A rate beyond 2^64 bytes per second saturates, which is the right answer for a display.
    format!("{}/s", DecimalBytes((n as f64 / seconds) as u64))
}

/// A latency with three significant figures: `980 ns`, `12.3 us`, `4.56 ms`, `1.20 s`.
pub(crate) fn nanos(n: u64) -> String {
    let (value, unit) = match n {
        0..1_000 => return format!("{n} ns"),
        1_000..1_000_000 => (n as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (n as f64 / 1e6, "ms"),
        _ => (n as f64 / 1e9, "s"),
    };
    let decimals = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// Seconds that a transfer took: `1.234 s`.
pub(crate) fn seconds(s: f64) -> String {
    format!("{s:.3} s")
}

/// How long something has been there: `2h 5m`.
pub(crate) fn age(seconds: u64) -> String {
    let text = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    // Two units tell enough.
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_without_unit_are_seconds() {
        assert_eq!(parse_duration("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert!(parse_duration("-1").is_err());
        assert!(parse_duration("soon").unwrap_err().contains("50us"));
        assert!(parse_duration("inf").is_err());
        assert!(parse_duration("NaN").is_err());
    }

    #[test]
    fn time_to_spin_needs_a_unit() {
        assert_eq!(parse_spin("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(parse_spin("0"), Ok(Duration::ZERO));
        for bad in ["5", "0.5", "-1us", "2h", "", "x"] {
            assert!(parse_spin(bad).unwrap_err().contains("as in 50us"), "{bad}");
        }
    }

    #[test]
    fn latencies_keep_three_figures() {
        assert_eq!(nanos(7), "7 ns");
        assert_eq!(nanos(1_234), "1.23 us");
        assert_eq!(nanos(12_345), "12.3 us");
        assert_eq!(nanos(123_456), "123 us");
        assert_eq!(nanos(9_999), "10.0 us");
        assert_eq!(nanos(4_560_000), "4.56 ms");
    }

    #[test]
    fn rate_over_no_time_is_not_a_number() {
        assert_eq!(rate(10, 0.0), "-");
        assert_eq!(rate(3_200_000_000, 1.0), "3.20 GB/s");
    }
}
