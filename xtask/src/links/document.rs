//! A Markdown file, reduced to what the checks look at.

use std::collections::BTreeSet;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::source::line_of;

/// Something in the document, and the line it is on.
pub(super) type Placed = (usize, String);

#[derive(Debug, Default)]
pub(super) struct Document {
    /// Where links and images lead.
    pub(super) links: Vec<Placed>,
    /// The text in `code`, outside of code blocks.
    pub(super) codes: Vec<Placed>,
    /// Names that a link into this document may end in.
    pub(super) anchors: BTreeSet<String>,
    pub(super) tables: Vec<Table>,
}

/// A table; each cell as the text in it, and the `code` in it.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) head: Vec<Cell>,
    pub(super) rows: Vec<(usize, Vec<Cell>)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) codes: Vec<String>,
}

impl Document {
    pub(super) fn parse(text: &str) -> Self {
        let mut document = Document::default();
        let mut heading: Option<String> = None;
        let mut table = Table::default();
        let mut row = Vec::new();
        let mut cell = Cell::default();
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let line = line_of(text, range.start);
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    document.links.push((line, dest_url.to_string()));
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => document.add_anchor(&heading.take().unwrap_or_default()),
                Event::Start(Tag::TableCell) => cell = Cell::default(),
                Event::End(TagEnd::TableCell) => row.push(std::mem::take(&mut cell)),
                Event::End(TagEnd::TableHead) => table.head = std::mem::take(&mut row),
                Event::End(TagEnd::TableRow) => table.rows.push((line, std::mem::take(&mut row))),
                Event::End(TagEnd::Table) => document.tables.push(std::mem::take(&mut table)),
                Event::Code(code) => {
                    document.codes.push((line, code.to_string()));
                    cell.codes.push(code.to_string());
                    cell.text.push_str(&code);
                    heading.iter_mut().for_each(|heading| heading.push_str(&code));
                }
                Event::Text(piece) => {
                    cell.text.push_str(&piece);
                    heading.iter_mut().for_each(|heading| heading.push_str(&piece));
                }
                _ => {}
            }
        }
        document
    }

    /// The anchor that code hosts make of a heading; a second one of the same name gets a number.
    fn add_anchor(&mut self, heading: &str) {
        let name: String = heading
            .trim()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() })
            .collect();
        let mut unique = name.clone();
        let mut number = 0;
        while !self.anchors.insert(unique.clone()) {
            number += 1;
            unique = format!("{name}-{number}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_codes_and_anchors_are_found_with_their_lines() {
        let document =
            Document::parse("# A *b* `c`, d\n\n[x](y.md#z) `q`\n\n```\n[no](no.md) `no`\n```\n\n# a b c d\n");
        assert_eq!(document.links, [(3, "y.md#z".to_owned())]);
        assert_eq!(document.codes, [(1, "c".to_owned()), (3, "q".to_owned())]);
        let anchors: Vec<&str> = document.anchors.iter().map(String::as_str).collect();
        assert_eq!(anchors, ["a-b-c-d", "a-b-c-d-1"]);
    }

    #[test]
    fn tables_are_read_by_cell() {
        let document = Document::parse("| what | Proved by |\n| --- | --- |\n| a | `b`, pending |\n");
        let table = &document.tables[0];
        assert_eq!(table.head[1].text, "Proved by");
        assert_eq!(table.rows[0].0, 3);
        assert_eq!(table.rows[0].1[1].codes, ["b"]);
        assert_eq!(table.rows[0].1[1].text, "b, pending");
    }
}
