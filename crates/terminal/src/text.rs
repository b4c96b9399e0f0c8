//! Text from elsewhere, made harmless for a terminal.
//!
//! A process chooses its own name, and a peer its own messages. Printed as they are, their control characters would move the
//! cursor, change what was printed before, or send input to the user's shell. So every string passes through here before it is printed.

use std::borrow::Cow;

/// The string with each control character written as an escape. For a name, or a cell of a table: it stays on its line.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, is_hostile, |c| c.escape_default().to_string())
}

/// Like [`printable`], for text of several lines: line feeds and tabs stay.
#[must_use]
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_hostile(c) && !matches!(c, '\n' | '\t'), |c| c.escape_default().to_string())
}

/// Like [`printable`], for a JSON document, which keeps its meaning.
#[must_use]
pub fn printable_json(text: &str) -> Cow<'_, str> {
    // A serializer escapes ASCII's control characters inside strings; outside of strings, only white space is left.
    escape(text, |c| is_hostile(c) && !c.is_ascii_whitespace(), |c| format!("\\u{:04x}", u32::from(c)))
}

fn escape(text: &str, hostile: impl Fn(char) -> bool, written: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&hostile) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().fold(String::with_capacity(text.len() + 16), |mut out, c| {
        if hostile(c) {
            out.push_str(&written(c))
        } else {
            out.push(c)
        }
        out
    }))
}

/// Control characters (C0, DEL, C1), separators of lines, and marks that change the order in which text is shown.
fn is_hostile(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clears the screen, in both spellings; turns the text around; ends the line.
    const HOSTILE: &str = "a\x1b[2Jb\u{9b}2Jc\u{202e}d\ne\tf\x7f";

    #[test]
    fn printable_escapes_every_control_character() {
        assert_eq!(printable(HOSTILE), "a\\u{1b}[2Jb\\u{9b}2Jc\\u{202e}d\\ne\\tf\\u{7f}");
        assert!(matches!(printable("nginx: wörker"), Cow::Borrowed("nginx: wörker")));
    }

    #[test]
    fn printable_lines_keeps_line_feeds_and_tabs() {
        assert_eq!(printable_lines(HOSTILE), "a\\u{1b}[2Jb\\u{9b}2Jc\\u{202e}d\ne\tf\\u{7f}");
    }

    #[test]
    fn printable_json_stays_json() {
        assert_eq!(printable_json("{\n\"a\": \"\u{9b}\u{202e}\x7f\"}"), "{\n\"a\": \"\\u009b\\u202e\\u007f\"}");
    }
}
