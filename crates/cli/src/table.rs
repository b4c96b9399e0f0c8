//! Plain tables for terminals and for `awk`: a header line, aligned columns, no frames.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// A table with these headings; those that begin with `>` are aligned right.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|h| h.trim_start_matches('>')));
    for (column, heading) in table.column_iter_mut().zip(headings) {
        column.set_padding((0, 2));
        if heading.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

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
