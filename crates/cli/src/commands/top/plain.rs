//! One look as a plain table, for files, pipes and `--once`.

use partywall_terminal::table;

use super::row::{HEADINGS, Look};

pub(super) fn text(look: &Look) -> String {
    let mut parts = Vec::new();
    if look.connections.is_empty() {
        parts.push("no program under `partywall run` is connected, and no channel is open".into());
    } else {
        let mut rows = table(&HEADINGS);
        for row in &look.connections {
            rows.add_row(row.cells());
        }
        parts.push(rows.to_string());
    }
    parts.extend(look.notes.iter().cloned());
    parts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::row::Row;
    use super::*;

    #[test]
    fn program_name_with_control_characters_is_escaped() {
        let row = Row { program: "\x1b]0;x\x07evil\nforged".into(), ..Row::default() };
        let shown = text(&Look { connections: vec![row], notes: Vec::new() });
        assert!(!shown.contains(['\x1b', '\x07']) && shown.lines().count() == 2, "{shown:?}");
    }

    #[test]
    fn rows_and_notes_are_shown() {
        assert!(text(&Look::default()).contains("no program"));
        let row = Row { program: "redis".into(), way: "tcp".into(), why: "because".into(), ..Row::default() };
        let shown = text(&Look { connections: vec![row], notes: vec!["no broker".into()] });
        assert!(shown.starts_with("PROGRAM") && shown.contains("because") && shown.ends_with("no broker"), "{shown}");
    }
}
