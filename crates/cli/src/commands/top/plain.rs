//! One look as a plain table, for files, pipes and `--once`.

use partywall_terminal::table;

use super::devices::TopLook;
use crate::connections::{HEADINGS, SHORT};

/// `narrow`: for a terminal that has no room for all columns.
pub(super) fn text(top: &TopLook, narrow: bool) -> String {
    let look = &top.look;
    let mut parts = Vec::new();
    if look.connections.is_empty() && look.left_out > 0 {
        parts.push(format!("no connection matches the filter; without it there are {}", look.left_out));
    } else if look.connections.is_empty() {
        parts.push("no program under `partywall run` is connected, and no channel is open".into());
    } else {
        let mut rows = if narrow { table(&SHORT) } else { table(&HEADINGS) };
        for row in &look.connections {
            if narrow {
                rows.add_row(row.short_cells());
            } else {
                rows.add_row(row.cells());
            }
        }
        parts.push(rows.to_string());
    }
    parts.extend(top.device_lines());
    parts.extend(look.notes.iter().cloned());
    parts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::{Cause, ConnectionRow, Look};

    fn shown(look: Look, narrow: bool) -> String {
        text(&TopLook { look, ..TopLook::default() }, narrow)
    }

    #[test]
    fn program_name_with_control_characters_is_escaped() {
        let row = ConnectionRow { program: "\x1b]0;x\x07evil\nforged".into(), ..ConnectionRow::default() };
        let shown = shown(Look { connections: vec![row], left_out: 0, notes: Vec::new() }, false);
        assert!(!shown.contains(['\x1b', '\x07']) && shown.lines().count() == 2, "{shown:?}");
    }

    #[test]
    fn rows_and_notes_are_shown() {
        assert!(shown(Look::default(), false).contains("no program"));
        let filtered = shown(Look { left_out: 3, ..Look::default() }, false);
        assert!(filtered.contains("filter") && filtered.contains("there are 3"), "{filtered}");
        let row = ConnectionRow {
            program: "redis".into(),
            way: "tcp".into(),
            reason: Some(Cause::Idle),
            why: "because".into(),
            ..ConnectionRow::default()
        };
        let look = Look { connections: vec![row], left_out: 0, notes: vec!["no broker".into()] };
        let look = TopLook { look, ..TopLook::default() };
        let shown = text(&look, false);
        assert!(shown.starts_with("PROGRAM") && shown.contains("because") && shown.ends_with("no broker"), "{shown}");
        let narrow = text(&look, true);
        assert!(narrow.contains("TRAFFIC") && narrow.contains("because") && !narrow.contains("SAVED"), "{narrow}");
        assert!(narrow.lines().all(|line| line.len() <= 80), "{narrow}");
    }
}
