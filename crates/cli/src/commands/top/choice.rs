//! The choice of rows, and their order.

use std::net::SocketAddr;

use crate::connections::{ConnectionRow, DirectionCount, Gatherer, Look, Scope};

/// The order of rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum RowOrder {
    /// Bytes per second, most first
    #[default]
    Rate,
    /// Bytes so far, most first
    Bytes,
    /// Name of the program
    Program,
    /// Address or name of the peer
    Peer,
}

impl RowOrder {
    /// The next order.
    pub(super) fn next(self) -> Self {
        match self {
            Self::Rate => Self::Bytes,
            Self::Bytes => Self::Program,
            Self::Program => Self::Peer,
            Self::Peer => Self::Rate,
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Bytes => "bytes",
            Self::Program => "program",
            Self::Peer => "peer",
        }
    }
}

/// The user's choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TopChoice {
    pub(super) sort: RowOrder,
    /// Rows are shown that have this text in one of their cells; all of them if it is empty.
    pub(super) filter: String,
}

impl TopChoice {
    /// Looks, and shows what was chosen.
    pub(super) fn look(&self, gatherer: &mut Gatherer<'_>) -> Look {
        let mut look = gatherer.look(Scope::Preloaded);
        look.left_out = self.apply(&mut look.connections);
        look
    }

    /// Sorts the rows, and removes those that the filter leaves out. Returns how many these are.
    pub(super) fn apply(&self, rows: &mut Vec<ConnectionRow>) -> usize {
        let all = rows.len();
        rows.retain(|row| self.takes(row));
        rows.sort_by(|a, b| {
            let first = match self.sort {
                RowOrder::Rate => b.rate().total_cmp(&a.rate()),
                RowOrder::Bytes => bytes(b).cmp(&bytes(a)),
                RowOrder::Program => a.program.cmp(&b.program),
                RowOrder::Peer => by_address(a).cmp(&by_address(b)),
            };
            first.then_with(|| a.key().cmp(&b.key()))
        });
        all - rows.len()
    }

    fn takes(&self, row: &ConnectionRow) -> bool {
        let filter = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&filter);
        let texts = [&row.program, &row.peer, &row.way, &row.reason_text(), &row.kind];
        filter.is_empty()
            || texts.into_iter().any(|text| has(text))
            || row.local.as_deref().is_some_and(has)
            || row.pid.is_some_and(|pid| pid.to_string() == filter)
    }
}

/// Names first, then addresses as numbers.
fn by_address(row: &ConnectionRow) -> (Option<SocketAddr>, &str) {
    (row.peer.parse().ok(), &row.peer)
}

fn bytes(row: &ConnectionRow) -> u64 {
    [row.sent, row.received].into_iter().flatten().map(DirectionCount::total).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(program: &str, pid: u32, way: &str, bytes: u64) -> ConnectionRow {
        let sent = Some(DirectionCount::of(bytes, 0));
        ConnectionRow {
            program: program.into(),
            pid: Some(pid),
            way: way.into(),
            peer: format!("10.0.0.{pid}:80"),
            sent,
            ..ConnectionRow::default()
        }
    }

    fn chosen(sort: RowOrder, filter: &str) -> Vec<u32> {
        let mut rows = vec![row("redis", 3, "ring", 5), row("nginx", 10, "tcp", 7), row("nginx", 1, "ring", 6)];
        TopChoice { sort, filter: filter.into() }.apply(&mut rows);
        rows.into_iter().filter_map(|row| row.pid).collect()
    }

    #[test]
    fn rows_are_ordered_as_chosen() {
        assert_eq!(chosen(RowOrder::Bytes, ""), [10, 1, 3]);
        assert_eq!(chosen(RowOrder::Program, ""), [1, 10, 3]);
        assert_eq!(chosen(RowOrder::Peer, ""), [1, 3, 10], "by number, not by digits");
        assert_eq!(chosen(RowOrder::Rate, "").len(), 3);
        let all = std::iter::successors(Some(RowOrder::Rate), |sort| Some(sort.next())).take(5).collect::<Vec<_>>();
        assert_eq!(all, [RowOrder::Rate, RowOrder::Bytes, RowOrder::Program, RowOrder::Peer, RowOrder::Rate]);
    }

    #[test]
    fn filter_takes_rows_by_any_cell_and_by_whole_process_number() {
        assert_eq!(chosen(RowOrder::Program, "NGINX"), [1, 10]);
        assert_eq!(chosen(RowOrder::Program, "ring"), [1, 3]);
        assert_eq!(chosen(RowOrder::Program, "10.0.0.3"), [3]);
        assert_eq!(chosen(RowOrder::Bytes, "1"), [10, 1, 3], "it is in every address");
        assert!(chosen(RowOrder::Rate, "postgres").is_empty());
        let mut rows = vec![row("redis", 3, "ring", 5), row("nginx", 10, "tcp", 7)];
        assert_eq!(TopChoice { filter: "redis".into(), ..TopChoice::default() }.apply(&mut rows), 1);
    }
}
