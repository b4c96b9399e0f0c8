//! The view that fills a terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table, TableState};
use signal_hook::consts::{SIGHUP, SIGTERM};

use super::gather::Gatherer;
use super::row::{HEADINGS, Look};
use crate::exit::{Context, Failure};
use crate::human;

/// How often keys and signals are looked for while nothing is drawn.
const TICK: Duration = Duration::from_millis(100);

/// Widths of the columns; the last takes what is left.
const WIDTHS: [u16; 13] = [16, 7, 26, 8, 10, 11, 10, 11, 5, 8, 8, 8, 9];

pub(super) fn run(gatherer: &mut Gatherer<'_>, interval: Duration) -> Result<(), Failure> {
    // A signal that ends us must leave the terminal restored.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot catch signals")?;
    }
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let result = watch(&mut terminal, gatherer, interval, &ended);
    ratatui::restore();
    result
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    gatherer: &mut Gatherer<'_>,
    interval: Duration,
    ended: &AtomicBool,
) -> Result<(), Failure> {
    let mut view = View { look: gatherer.look(), held: false, at: TableState::default() };
    let mut next = Instant::now() + interval;
    while !ended.load(Ordering::Relaxed) {
        terminal.draw(|frame| view.draw(frame)).context("cannot draw on this terminal")?;
        let wait = next.saturating_duration_since(Instant::now()).min(TICK);
        if event::poll(wait).context("cannot read from this terminal")? {
            let event = event::read().context("cannot read from this terminal")?;
            if view.handle(&event) == After::Leave {
                return Ok(());
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + interval;
            if !view.held {
                view.look = gatherer.look();
            }
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum After {
    Stay,
    Leave,
}

#[derive(Debug)]
struct View {
    look: Look,
    held: bool,
    at: TableState,
}

impl View {
    fn handle(&mut self, event: &Event) -> After {
        let Event::Key(key) = event else { return After::Stay };
        if key.kind == KeyEventKind::Release {
            return After::Stay;
        }
        let last = self.look.connections.len().saturating_sub(1);
        let here = self.at.selected().unwrap_or(0);
        let to = |row: usize| Some(row.min(last));
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return After::Leave,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return After::Leave,
            KeyCode::Char(' ') => self.held = !self.held,
            KeyCode::Down | KeyCode::Char('j') => self.at.select(to(here + 1)),
            KeyCode::Up | KeyCode::Char('k') => self.at.select(to(here.saturating_sub(1))),
            KeyCode::PageDown => self.at.select(to(here + 20)),
            KeyCode::PageUp => self.at.select(to(here.saturating_sub(20))),
            KeyCode::Home => self.at.select(to(0)),
            KeyCode::End => self.at.select(to(last)),
            _ => {}
        }
        After::Stay
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]);
        let [top, middle, bottom] = areas.areas(frame.area());
        frame.render_widget(Line::styled(self.title(), Style::new().add_modifier(Modifier::BOLD)), top);
        let widths = WIDTHS.map(Constraint::Length).into_iter().chain([Constraint::Min(20)]);
        let heading = Row::new(HEADINGS.map(|heading| cell(heading, heading.trim_start_matches('>').to_owned())));
        let rows = self.look.connections.iter().map(|row| {
            let colour = if row.way == "ring" { Color::Green } else { Color::Yellow };
            let cells = HEADINGS.into_iter().zip(row.cells()).map(|(heading, text)| match heading {
                "WAY" => cell(heading, text).style(Style::new().fg(colour)),
                _ => cell(heading, text),
            });
            Row::new(cells.collect::<Vec<_>>())
        });
        let table = Table::new(rows, widths)
            .header(heading.style(Style::new().add_modifier(Modifier::REVERSED)))
            .row_highlight_style(Style::new().add_modifier(Modifier::UNDERLINED));
        frame.render_stateful_widget(table, middle, &mut self.at);
        let foot = match self.look.notes.as_slice() {
            [] => "q leaves, space holds, arrows scroll".to_owned(),
            notes => notes.join("; "),
        };
        frame.render_widget(Line::styled(foot, Style::new().fg(Color::DarkGray)), bottom);
    }

    fn title(&self) -> String {
        let rows = &self.look.connections;
        let on_ring = rows.iter().filter(|row| row.way == "ring").count();
        let rate: f64 = rows.iter().map(super::row::Row::rate).sum();
        let held = if self.held { " (held)" } else { "" };
        let rate = human::rate(rate as u64, 1.0);
        format!("partywall: {} connections, {on_ring} on the ring, {rate} in sum{held}", rows.len())
    }
}

fn cell(heading: &str, text: String) -> Cell<'static> {
    let alignment = if heading.starts_with('>') { Alignment::Right } else { Alignment::Left };
    Cell::from(Line::from(text).alignment(alignment))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    fn key(code: KeyCode) -> Event {
        Event::Key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn view(rows: usize) -> View {
        let row = |n: usize| super::super::row::Row {
            program: format!("program-{n}"),
            way: "tcp".into(),
            why: "because of it".into(),
            ..Default::default()
        };
        let connections = (0..rows).map(row).collect();
        View { look: Look { connections, notes: Vec::new() }, held: false, at: TableState::default() }
    }

    fn drawn(view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(200, 10)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn screen_shows_connections_and_reasons() {
        let shown = drawn(&mut view(2));
        for words in ["2 connections, 0 on the ring", "PROGRAM", "program-1", "because of it", "q leaves"] {
            assert!(shown.contains(words), "{words} is missing:\n{shown}");
        }
    }

    #[test]
    fn keys_scroll_pause_and_quit() {
        let mut view = view(50);
        assert!(!drawn(&mut view).contains("program-49"));
        assert_eq!(view.handle(&key(KeyCode::End)), After::Stay);
        assert!(drawn(&mut view).contains("program-49"));
        view.handle(&key(KeyCode::PageUp));
        assert_eq!(view.at.selected(), Some(29));
        view.handle(&key(KeyCode::Char(' ')));
        assert!(view.held && drawn(&mut view).contains("(held)"));
        assert_eq!(view.handle(&key(KeyCode::Char('q'))), After::Leave);
        let interrupt = Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert_eq!(view.handle(&interrupt), After::Leave);
    }

    #[test]
    fn empty_view_and_tiny_terminal_are_drawn() {
        let mut empty = view(0);
        empty.handle(&key(KeyCode::Down));
        assert!(drawn(&mut empty).contains("0 connections"));
        let mut terminal = Terminal::new(TestBackend::new(3, 2)).unwrap();
        terminal.draw(|frame| empty.draw(frame)).unwrap();
    }
}
