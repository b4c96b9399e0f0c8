//! The rates of the latest looks, as sparklines.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::Line;
use ratatui::widgets::{Sparkline, SparklineBar};

use crate::connections::{ConnectionRow, Look};
use crate::human;

/// Looks that are remembered: as many as the widest terminal has columns.
const LOOKS: usize = 500;
/// Columns of the name, and of the present rate.
const SIDES: [u16; 2] = [5, 13];
/// Lines that the sparklines take.
pub(super) const LINES: u16 = 2;

/// Bytes per second by rings and by TCP, over all rows that are shown.
#[derive(Debug, Default)]
pub(super) struct RateTrend {
    rates: VecDeque<[u64; 2]>,
}

impl RateTrend {
    /// Remembers the rates of a look. The first look has none.
    pub(super) fn add(&mut self, look: &Look) {
        let flows = || look.connections.iter().flat_map(ConnectionRow::flows);
        if !look.connections.is_empty() && flows().all(|flow| flow.rate().is_none()) {
            return;
        }
        let sum = |rate: fn(&crate::connections::DirectionCount) -> Option<f64>| {
            flows().filter_map(|flow| rate(&flow)).sum::<f64>() as u64
        };
        if self.rates.len() == LOOKS {
            self.rates.pop_front();
        }
        self.rates.push_back([sum(|flow| flow.ring_rate), sum(|flow| flow.tcp_rate)]);
    }

    /// Forgets everything: other rows are shown.
    pub(super) fn clear(&mut self) {
        self.rates.clear();
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>, area: Rect) {
        let lines: [Rect; LINES as usize] = Layout::vertical([Constraint::Length(1); LINES as usize]).areas(area);
        // Both have one scale: otherwise a little TCP looks like as much as a busy ring.
        let most = self.rates.iter().flatten().copied().max().unwrap_or(0).max(1);
        for (at, (name, colour)) in [("ring", Color::Green), ("tcp", Color::Yellow)].into_iter().enumerate() {
            let [before, after] = SIDES.map(Constraint::Length);
            let [left, middle, right] = Layout::horizontal([before, Constraint::Min(1), after]).areas(lines[at]);
            let newest: Vec<SparklineBar> = {
                let first = self.rates.len().saturating_sub(middle.width.into());
                self.rates.iter().skip(first).map(|rates| SparklineBar::from(rates[at])).collect()
            };
            let style = Style::new().fg(colour);
            frame.render_widget(Line::styled(name, style), left);
            frame.render_widget(Sparkline::default().data(newest).max(most).style(style), middle);
            let now = self.rates.back().map_or_else(String::new, |rates| human::rate(rates[at], 1.0));
            frame.render_widget(Line::styled(now, style).right_aligned(), right);
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::connections::DirectionCount;

    fn look(ring: f64, tcp: f64) -> Look {
        let sent = DirectionCount { ring_rate: Some(ring), tcp_rate: Some(tcp), ..DirectionCount::default() };
        let row = ConnectionRow { sent: Some(sent), ..ConnectionRow::default() };
        Look { connections: vec![row], left_out: 0, notes: Vec::new() }
    }

    fn drawn(trend: &RateTrend, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, LINES)).unwrap();
        terminal.draw(|frame| trend.draw(frame, frame.area())).unwrap();
        terminal.backend().to_string().lines().map(str::to_owned).collect()
    }

    #[test]
    fn transport_bars_share_scale_and_show_current_rate() {
        let mut trend = RateTrend::default();
        trend.add(&Look { connections: vec![ConnectionRow::default()], left_out: 0, notes: Vec::new() });
        assert!(trend.rates.is_empty(), "the first look has no rates");
        for rate in [0.0, 500.0, 1000.0] {
            trend.add(&look(rate, 500.0));
        }
        let lines = drawn(&trend, 40);
        assert!(lines[0].contains("ring") && lines[0].contains("▄█") && lines[0].contains("1.00 kB/s"), "{lines:?}");
        assert!(lines[1].contains("tcp") && lines[1].contains("▄▄▄") && lines[1].contains("500 B/s"), "{lines:?}");
        trend.clear();
        assert!(!drawn(&trend, 40)[0].contains('█'));
    }

    #[test]
    fn newest_rates_are_shown_and_old_ones_forgotten() {
        let mut trend = RateTrend::default();
        for n in 0..LOOKS + 10 {
            trend.add(&look(if n == LOOKS + 9 { 8.0 } else { 0.0 }, 0.0));
        }
        assert_eq!(trend.rates.len(), LOOKS);
        assert!(drawn(&trend, 30)[0].contains('█'));
        drawn(&trend, 3);
    }
}
