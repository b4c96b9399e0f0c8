//! Answers on standard output.

/// Prints to standard output; a closed one is an error, not a panic.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<(), crate::exit::Failure> {
    use std::io::Write;

    use crate::exit::Context;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints as JSON, indented.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), crate::exit::Failure> {
    print(serde_json::to_string_pretty(value).map_err(|e| crate::exit::Failure::general(e.to_string()))?)
}
