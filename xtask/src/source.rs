//! Rust source, told apart into code and comments.
//!
//! A scanner, not a parser: it knows comments, strings, raw strings, characters and lifetimes, which is what it takes
//! to say whether the word `unsafe` is code.

/// A source file as two texts of the same length and the same lines: in `code`, comments and the contents of strings
/// are blanks; in `comments`, everything else is.
#[derive(Debug)]
pub(crate) struct Source {
    code: String,
    comments: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Code,
    Comment,
    Literal,
}

impl Source {
    pub(crate) fn scan(text: &str) -> Self {
        let parts = classify(text.as_bytes());
        let keep = |wanted: Part| {
            let bytes = text
                .bytes()
                .zip(&parts)
                .map(|(byte, part)| if byte == b'\n' || (*part == wanted && byte.is_ascii()) { byte } else { b' ' });
            // Only ASCII is kept, so this replaces nothing.
            String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
        };
        Source { code: keep(Part::Code), comments: keep(Part::Comment) }
    }

    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    pub(crate) fn comments(&self) -> &str {
        &self.comments
    }
}

/// The number of the line, from 1, that byte `at` of `text` is on.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

fn classify(text: &[u8]) -> Vec<Part> {
    let mut parts = vec![Part::Code; text.len()];
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let in_word = at > 0 && (text[at - 1].is_ascii_alphanumeric() || text[at - 1] == b'_');
        let (part, length) = if rest.starts_with(b"//") {
            (Part::Comment, until_newline(rest))
        } else if rest.starts_with(b"/*") {
            (Part::Comment, block_comment(rest))
        } else if rest[0] == b'"' {
            (Part::Literal, quoted(rest, b'"'))
        } else if rest[0] == b'r' && raw_string(rest).is_some() && (!in_word || after_prefix(text, at)) {
            (Part::Literal, raw_string(rest).unwrap_or(1))
        } else if rest[0] == b'\'' && is_character(rest) {
            (Part::Literal, quoted(rest, b'\''))
        } else {
            (Part::Code, 1)
        };
        parts[at..at + length].fill(part);
        if part == Part::Literal {
            // The delimiters stay, so that `reason = ""` is still seen to have a string.
            parts[at] = Part::Code;
            parts[at + length - 1] = Part::Code;
        }
        at += length;
    }
    parts
}

fn until_newline(rest: &[u8]) -> usize {
    rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Whether the `r` at `at` belongs to the prefix of a byte or C string (`br"`, `cr"`) rather than to a word.
fn after_prefix(text: &[u8], at: usize) -> bool {
    matches!(text[at - 1], b'b' | b'c') && (at < 2 || !(text[at - 2].is_ascii_alphanumeric() || text[at - 2] == b'_'))
}

/// The length of the raw string that starts here, if one does.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return None;
    }
    let mut end = vec![b'"'];
    end.resize(1 + hashes, b'#');
    let body = 2 + hashes;
    let length =
        rest[body..].windows(end.len()).position(|window| window == end).map_or(rest.len(), |at| body + at + end.len());
    Some(length)
}

/// Whether the quote here begins a character rather than a lifetime.
fn is_character(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(byte) if byte.is_ascii() => rest.get(2) == Some(&b'\''),
        // Not ASCII: a character of several bytes, closed within five, or (never seen) a lifetime in another script.
        Some(_) => rest.iter().take(6).skip(2).any(|byte| *byte == b'\''),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::scan(text).code().to_owned()
    }

    #[test]
    fn words_in_comments_and_strings_are_not_code() {
        for text in [
            "// unsafe",
            "/* a /* unsafe */ unsafe */",
            "\"unsafe\"",
            "\"\\\"unsafe\"",
            "r#\"x\" unsafe\"#",
            "br\"unsafe\"",
            "'\\'' /*unsafe*/",
        ] {
            assert!(!code(text).contains("unsafe"), "{text}: {}", code(text));
        }
    }

    #[test]
    fn words_beside_comments_strings_and_lifetimes_are_code() {
        for text in [
            "/* x */ unsafe",
            "\"\\\\\" unsafe",
            "r\"\\\" unsafe",
            "&'a str, unsafe",
            "'\"' unsafe '\"'",
            "'é' unsafe",
            "for\"x\" unsafe",
        ] {
            assert!(code(text).contains("unsafe"), "{text}: {}", code(text));
        }
    }

    #[test]
    fn code_and_comments_keep_their_places() {
        let text = "let x = 1; // why\n\"é\" // more";
        let source = Source::scan(text);
        assert_eq!(source.code().len(), text.len());
        assert_eq!(source.comments().len(), text.len());
        assert_eq!(source.comments().lines().next().map(str::trim), Some("// why"));
        assert_eq!(line_of(text, text.find("more").unwrap()), 2);
    }
}
