//! Results on standard output. Everything passes through here, so that no foreign string controls the terminal.

use std::fmt::Display;
use std::io::Write;

use partywall_terminal::{printable_json, printable_lines};
use serde::Serialize;

use crate::exit::{CommandFailure, Context};

/// Moves the cursor to the top left corner and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Prints text to standard output. An output that takes no more is an error, not a panic.
pub(crate) fn print(text: impl Display) -> Result<(), CommandFailure> {
    write_line(&printable_lines(&text.to_string()))
}

/// Prints text in place of what the screen shows.
pub(crate) fn print_screen(text: impl Display) -> Result<(), CommandFailure> {
    write_line(&format!("{CLEAR}{}", printable_lines(&text.to_string())))
}

/// Prints JSON, indented.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CommandFailure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| CommandFailure::general(e.to_string()))?;
    write_line(&printable_json(&text))
}

/// Prints JSON in one line.
pub(crate) fn print_json_line(value: &impl Serialize) -> Result<(), CommandFailure> {
    let text = serde_json::to_string(value).map_err(|e| CommandFailure::general(e.to_string()))?;
    write_line(&printable_json(&text))
}

fn write_line(text: &str) -> Result<(), CommandFailure> {
    write(format!("{text}\n").as_bytes())
}

/// Writes what is no text for a terminal. A reader that has seen enough (`| head`) ends the command, and is no error.
pub(crate) fn write(bytes: &[u8]) -> Result<(), CommandFailure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(CommandFailure::reader_left()),
        written => written.context("cannot write to standard output"),
    }
}
