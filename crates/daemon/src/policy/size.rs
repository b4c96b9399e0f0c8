//! Sizes in bytes: a number, or text with K, M, G or T (powers of 1024), as on command lines.

use serde::{Deserialize, Deserializer};

/// A size as the file has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NumberOrText")]
pub(super) struct Size(pub(super) u64);

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of bytes, or text such as \"16M\"")]
enum NumberOrText {
    Number(u64),
    Text(String),
}

impl TryFrom<NumberOrText> for Size {
    type Error = String;

    fn try_from(size: NumberOrText) -> Result<Self, String> {
        match size {
            NumberOrText::Number(bytes) => Ok(Self(bytes)),
            NumberOrText::Text(text) => {
                parse_size::Config::new().with_binary().parse_size(&text).map(Self).map_err(|e| {
                    format!("{text:?}: {e}; write a number of bytes, or one with K, M, G or T, as in \"16M\"")
                })
            }
        }
    }
}

/// Reads a field of type `u64`.
pub(super) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Size::deserialize(from).map(|size| size.0)
}

/// Reads a field of type `Option<u64>` that is there.
pub(super) fn some_bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    bytes(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct File {
        #[serde(deserialize_with = "bytes")]
        size: u64,
    }

    fn size(text: &str) -> Result<u64, String> {
        toml::from_str::<File>(&format!("size = {text}")).map(|file| file.size).map_err(|e| e.to_string())
    }

    #[test]
    fn sizes_are_numbers_or_text_with_a_unit() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("\"4096\""), Ok(4096));
        assert_eq!(size("\"16M\""), Ok(16 << 20));
        assert_eq!(size("\"64 GiB\""), Ok(64 << 30));
        for wrong in ["\"16X\"", "-1", "\"\"", "1.5", "true"] {
            let said = size(wrong).unwrap_err();
            assert!(said.contains("16M"), "{wrong}: {said}");
        }
    }
}
