//! Whole numbers and sizes on a command line.

use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;

/// A parser of whole numbers in `range`, for clap, which says of other text what to write instead.
pub fn whole<T>(
    range: impl RangeBounds<T> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Copy + Send + Sync + 'static,
{
    move |text| match text.parse::<T>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(match (range.start_bound(), range.end_bound()) {
            (Bound::Included(least), Bound::Included(most)) => format!("write a whole number from {least} to {most}"),
            (Bound::Included(least), _) => format!("write a whole number, {least} or more"),
            _ => "write a whole number".to_owned(),
        }),
    }
}

/// A number of bytes for people, in powers of 1024: `1.50 MiB`.
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}

/// Reads a size in bytes: a plain number, or with K, M, G, T (powers of 1024; `KiB` and `kb` mean the same).
pub fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|_| "write a number of bytes, or one with K, M or G, as in 64K or 4M".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_has_units_of_1024() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64K"), Ok(65536));
        assert_eq!(size("1MiB"), Ok(1 << 20));
        assert_eq!(size("2g"), Ok(2 << 30));
        assert_eq!(size("3T"), Ok(3 << 40));
        assert!(size("lots").unwrap_err().contains("64K"));
        assert!(size("-1").is_err());
    }

    #[test]
    fn number_outside_of_the_range_names_the_range() {
        let rounds = whole(1..=99_u32);
        assert_eq!((rounds("1"), rounds("99")), (Ok(1), Ok(99)));
        for bad in ["0", "100", "x", "", "-1", "1.5", "99999999999999999999999"] {
            assert_eq!(rounds(bad), Err("write a whole number from 1 to 99".into()), "{bad}");
        }
        assert_eq!(whole::<u64>(1..)("0"), Err("write a whole number, 1 or more".into()));
        assert_eq!(whole::<usize>(..)("x"), Err("write a whole number".into()));
    }
}
