//! Plain tables for terminals and for `awk`: a header line, aligned columns, no frames.

use std::fmt;

use comfy_table::{CellAlignment, ContentArrangement, presets};

use crate::text::printable;

/// A table. Control characters in its cells are escaped, so a row stays one line.
#[derive(Debug)]
pub struct Table(comfy_table::Table);

/// A table with these headings; those that begin with `>` are aligned right.
#[must_use]
pub fn table(headings: &[&str]) -> Table {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|h| h.trim_start_matches('>')));
    for (column, heading) in table.column_iter_mut().zip(headings) {
        column.set_padding((0, 2));
        if heading.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    Table(table)
}

impl Table {
    /// Adds a row, a cell for each heading.
    pub fn add_row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) -> &mut Self {
        self.0.add_row(cells.into_iter().map(|cell| printable(cell.as_ref()).into_owned()));
        self
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_as_their_headings_say() {
        let mut table = table(&["name", ">bytes"]);
        table.add_row(["a", "1"]).add_row(["longer", "12345"]);
        let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
        assert_eq!(lines, ["name    bytes", "a           1", "longer  12345"]);
    }

    #[test]
    fn cell_with_control_characters_stays_on_its_line() {
        let mut table = table(&["name", "next"]);
        table.add_row(["\x1b[2Jevil\nforged", "x"]);
        let text = table.to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.contains('\x1b'), "{text:?}");
    }
}
