//! Plain tables for terminals and for `awk`: a header line, aligned columns, no frames.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// A table with these headings; those that begin with `>` are aligned right.
#[must_use]
pub fn table(headings: &[&str]) -> Table {
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
}
