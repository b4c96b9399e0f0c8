//! Terminal tables: one row per measurement, its range and its ratio beside it.

use partywall_terminal::Table;
pub(crate) use partywall_terminal::table;

use crate::{
    mechanism::Mechanism,
    report::{
        cell::{Cell, Setting},
        compare::Comparison,
        metric::{Better, Metric},
        unit,
        verdict::Verdict,
    },
};

/// How measurements are laid out.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    /// Settings that make a group of rows, with their headings.
    pub(crate) group: &'a [(&'a str, &'a str)],
    /// Settings that tell rows of a group apart, with their headings.
    pub(crate) row: &'a [(&'a str, &'a str)],
    /// Quantities to show; the first with its range and ratio.
    pub(crate) metrics: &'a [Metric],
    /// The mechanism that ratios are relative to: its first measured cell in each group.
    pub(crate) baseline: Mechanism,
}

/// Lays measurements out, group by group in the order in which groups first occur. Problems follow below.
pub(crate) fn cells(cells: &[Cell], layout: &Layout<'_>) -> String {
    let ratio = format!(">x {}", layout.baseline);
    let mut headings: Vec<String> = layout.group.iter().map(|(_, heading)| format!(">{heading}")).collect();
    headings.push("mechanism".into());
    headings.extend(layout.row.iter().map(|(_, heading)| format!(">{heading}")));
    if let [first, rest @ ..] = layout.metrics {
        headings.extend([format!(">{}", first.name()), ">min .. max".into(), ratio]);
        headings.extend(rest.iter().map(|metric| format!(">{}", metric.name())));
    }
    let mut out = table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let columns = headings.len();
    let mut groups: Vec<Vec<Option<&Setting>>> = Vec::new();
    for cell in cells {
        let group = group_of(cell, layout);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    for (at, group) in groups.iter().enumerate() {
        if at > 0 {
            out.add_row(vec![""; columns]);
        }
        let members: Vec<&Cell> =
            cells.iter().filter(|cell| group_of(cell, layout) == *group && !cell.runs.is_empty()).collect();
        let base = layout.metrics.first().and_then(|metric| {
            members.iter().find(|cell| cell.key.mechanism == layout.baseline).and_then(|cell| cell.median(*metric))
        });
        for cell in members {
            out.add_row(row(cell, layout, base));
        }
    }
    let mut text = text(&out);
    let mut told = Vec::new();
    for cell in cells {
        if let Some(problem) = &cell.problem {
            let line = format!("\n{}: {problem}", cell.key.mechanism);
            if !told.contains(&line) {
                text.push_str(&line);
                told.push(line);
            }
        }
    }
    text
}

fn group_of<'a>(cell: &'a Cell, layout: &Layout<'_>) -> Vec<Option<&'a Setting>> {
    layout.group.iter().map(|(name, _)| cell.key.settings.get(*name)).collect()
}

fn row(cell: &Cell, layout: &Layout<'_>, base: Option<f64>) -> Vec<String> {
    let setting = |(name, _): &(&str, &str)| match cell.key.settings.get(*name) {
        Some(Setting::Number(n)) if matches!(*name, "message" | "request" | "total" | "ring") => unit::bytes(*n),
        Some(Setting::Number(n)) if *name == "rate" => unit::rate(*n as f64),
        Some(Setting::Number(n)) => n.to_string(),
        Some(Setting::Word(word)) => word.clone(),
        None => String::new(),
    };
    let mut row: Vec<String> = layout.group.iter().map(setting).collect();
    row.push(cell.key.mechanism.to_string());
    row.extend(layout.row.iter().map(setting));
    let show = |metric: Metric, value: Option<f64>| value.map_or_else(|| "-".into(), |value| metric.show(value));
    if let [first, rest @ ..] = layout.metrics {
        let summary = cell.summary(*first);
        row.push(show(*first, summary.map(|s| s.median)));
        row.push(summary.map_or_else(|| "-".into(), |s| format!("{} .. {}", first.show(s.min), first.show(s.max))));
        let ratio = summary.zip(base).filter(|(_, base)| *base > 0.0).map(|(s, base)| unit::digits(s.median / base));
        row.push(ratio.unwrap_or_else(|| "-".into()));
        row.extend(rest.iter().map(|metric| show(*metric, cell.median(*metric))));
    }
    row
}

/// Every quantity of every cell, for measurements that have little in common.
pub(crate) fn listing(cells: &[Cell]) -> String {
    let mut out = table(&["measurement", "quantity", ">median", ">min .. max"]);
    for cell in cells {
        for metric in cell.metrics() {
            if let Some(s) = cell.summary(metric) {
                let range = format!("{} .. {}", metric.show(s.min), metric.show(s.max));
                out.add_row([cell.key.to_string(), metric.name().into(), metric.show(s.median), range]);
            }
        }
    }
    let problems = cells.iter().filter_map(|cell| Some(format!("\n{}: {}", cell.key, cell.problem.as_ref()?)));
    text(&out) + &problems.collect::<String>()
}

/// The list of claims.
pub(crate) fn verdicts(verdicts: &[Verdict]) -> String {
    let mut out = table(&["claim", ">target", ">measured", "verdict", ">figures"]);
    for verdict in verdicts {
        out.add_row([
            verdict.claim.clone(),
            verdict.target(),
            verdict.measured.map_or_else(|| "-".into(), unit::digits),
            verdict.word().into(),
            verdict.figures.clone(),
        ]);
    }
    text(&out)
}

/// Two reports side by side.
pub(crate) fn comparison(comparison: &Comparison) -> String {
    let mut out = table(&[
        "measurement",
        "quantity",
        ">before",
        ">min .. max",
        ">after",
        ">min .. max",
        ">after/before",
        "verdict",
    ]);
    for pairing in &comparison.pairings {
        let show = |value: f64| pairing.metric.show(value);
        let better = match pairing.metric.better() {
            Better::Higher => "+",
            Better::Lower => "-",
            Better::Neither => "",
        };
        out.add_row([
            pairing.key.to_string(),
            format!("{} ({better})", pairing.metric.name()),
            show(pairing.before.median),
            format!("{} .. {}", show(pairing.before.min), show(pairing.before.max)),
            show(pairing.after.median),
            format!("{} .. {}", show(pairing.after.min), show(pairing.after.max)),
            pairing.ratio().map_or_else(|| "-".into(), unit::digits),
            pairing.change.word().into(),
        ]);
    }
    let mut text = text(&out);
    text.push_str("\n(+) more is better, (-) less is better. A verdict needs ranges that do not touch.");
    for (count, which) in [(comparison.only_before, "first"), (comparison.only_after, "second")] {
        if count > 0 {
            text.push_str(&format!("\n{count} measurements are only in the {which} file."));
        }
    }
    text
}

/// The table without the spaces that padding leaves at the end of lines.
pub(crate) fn text(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        report::cell::{Key, Problem},
        task::Figures,
    };

    #[test]
    fn table_shows_ratio_and_range_beside_the_figure() {
        let cell = |mechanism, rates: &[f64]| {
            let mut cell = Cell::new(Key::new("stream", mechanism).with("message", 64));
            cell.runs = rates.iter().map(|rate| Figures::from([(Metric::BytesPerSecond, *rate)])).collect();
            cell
        };
        let mut missing = cell(Mechanism::TcpVeth, &[]);
        missing.problem = Some(Problem::Unavailable("needs root".into()));
        let all = [cell(Mechanism::Partywall, &[8e9, 9e9, 7e9]), cell(Mechanism::Unix, &[2e9]), missing];
        let layout = Layout {
            group: &[("message", "message")],
            row: &[],
            metrics: &[Metric::BytesPerSecond],
            baseline: Mechanism::Unix,
        };
        let text = cells(&all, &layout);
        let line = text.lines().find(|line| line.contains("partywall")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>().join(" "),
            "64 B partywall 8.00 GB/s 7.00 GB/s .. 9.00 GB/s 4.00"
        );
        assert!(text.contains("tcp-veth: not measured: needs root"));
    }
}
