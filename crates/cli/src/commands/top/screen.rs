//! The view that fills a terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use signal_hook::consts::{SIGHUP, SIGTERM};

use super::choice::TopChoice;
use super::devices::{ShownDeviceArgs, TopLook};
use super::trend::{self, RateTrend};
use crate::connections::{Gatherer, HEADINGS, SHORT, WIDE};
use crate::exit::{CommandFailure, Context};
use crate::human;

/// How often keys and signals are looked for while nothing is drawn.
const TICK: Duration = Duration::from_millis(100);

/// Lines of a terminal from which on rates have sparklines.
const LOW: u16 = 16;
/// Widths of the columns; the last takes the rest.
const WIDTHS: [u16; 13] = [16, 7, 26, 8, 10, 11, 10, 11, 5, 8, 8, 8, 9];
/// The widths on a narrow terminal: an IPv4 address with its port fits.
const SHORT_WIDTHS: [u16; 5] = [13, 7, 21, 8, 11];

pub(super) fn run(
    gatherer: &mut Gatherer<'_>,
    interval: Duration,
    choice: TopChoice,
    devices: &ShownDeviceArgs,
) -> Result<(), CommandFailure> {
    // A signal that ends us must leave the terminal restored.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot catch signals")?;
    }
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let wanted = TopWishes { choice, devices };
    let result = watch(&mut terminal, gatherer, interval, wanted, &ended);
    ratatui::restore();
    result
}

/// The user's wishes.
struct TopWishes<'a> {
    choice: TopChoice,
    devices: &'a ShownDeviceArgs,
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    gatherer: &mut Gatherer<'_>,
    interval: Duration,
    TopWishes { choice, devices }: TopWishes<'_>,
    ended: &AtomicBool,
) -> Result<(), CommandFailure> {
    let look = devices.look(choice.look(gatherer));
    let trend = RateTrend::default();
    let mut view = View { look, choice, trend, typing: false, held: false, at: TableState::default() };
    let mut next = Instant::now() + interval;
    while !ended.load(Ordering::Relaxed) {
        terminal.draw(|frame| view.draw(frame)).context("cannot draw on this terminal")?;
        let wait = next.saturating_duration_since(Instant::now()).min(TICK);
        if event::poll(wait).context("cannot read from this terminal")? {
            let event = event::read().context("cannot read from this terminal")?;
            match view.handle(&event) {
                After::Leave => return Ok(()),
                After::Look => {
                    view.trend.clear();
                    view.look(gatherer, devices);
                }
                After::Stay => {}
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + interval;
            if !view.held {
                view.look(gatherer, devices);
            }
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum After {
    Stay,
    /// Something else is to be shown.
    Look,
    Leave,
}

#[derive(Debug)]
struct View {
    look: TopLook,
    choice: TopChoice,
    trend: RateTrend,
    /// Keys are letters of the filter.
    typing: bool,
    held: bool,
    at: TableState,
}

impl View {
    fn look(&mut self, gatherer: &mut Gatherer<'_>, devices: &ShownDeviceArgs) {
        self.look = devices.look(self.choice.look(gatherer));
        self.trend.add(&self.look.look);
    }

    fn handle(&mut self, event: &Event) -> After {
        let Event::Key(key) = event else { return After::Stay };
        if key.kind == KeyEventKind::Release {
            return After::Stay;
        }
        if self.typing {
            return self.type_filter(key.code);
        }
        let last = self.look.look.connections.len().saturating_sub(1);
        let here = self.at.selected().unwrap_or(0);
        let to = |row: usize| Some(row.min(last));
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return After::Leave,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return After::Leave,
            KeyCode::Char(' ') => self.held = !self.held,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => {
                self.choice.sort = self.choice.sort.next();
                return After::Look;
            }
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

    fn type_filter(&mut self, key: KeyCode) -> After {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.choice.filter.clear();
            }
            KeyCode::Backspace => drop(self.choice.filter.pop()),
            KeyCode::Char(letter) => self.choice.filter.push(letter),
            _ => return After::Stay,
        }
        After::Look
    }

    /// The last line: what is being typed, what is missing, the reason of the selected row, or the keys.
    fn foot(&self, narrow: bool) -> String {
        let selected =
            self.look.look.connections.get(self.at.selected().unwrap_or(0)).filter(|row| !row.why.is_empty());
        match (self.look.look.notes.as_slice(), selected) {
            _ if self.typing => format!("filter: {}_   (Enter keeps it, Esc removes it)", self.choice.filter),
            ([], Some(row)) if narrow => format!("{}: {}", row.program, row.why),
            ([], _) => "q leaves, space holds, arrows scroll, s sorts, / filters".to_owned(),
            // The lines after the first are a rule of the policy.
            (notes, _) => notes.iter().filter_map(|note| note.lines().next()).collect::<Vec<_>>().join("; "),
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let narrow = frame.area().width < WIDE;
        // A terminal of few lines has them for rows.
        let trend = if frame.area().height >= LOW { trend::LINES } else { 0 };
        let devices = self.look.device_lines();
        // They take at most a third of it.
        let most = usize::from(frame.area().height / 3);
        let below = u16::try_from(devices.len().min(most)).unwrap_or(0);
        let lengths = [1, trend].map(Constraint::Length).into_iter().chain([Constraint::Min(1)]);
        let lengths = lengths.chain([below, 1].map(Constraint::Length));
        let [top, rates, middle, of_devices, bottom] = Layout::vertical(lengths).areas(frame.area());
        let hidden = devices.len() - usize::from(below);
        let mut lines: Vec<Line<'_>> = devices.into_iter().take(usize::from(below)).map(Line::from).collect();
        if let (Some(last), 1..) = (lines.last_mut(), hidden) {
            *last = Line::from(format!("and {} more switch ports and disks (`partywall stat --total`)", hidden + 1));
        }
        frame.render_widget(Paragraph::new(lines), of_devices);
        if trend > 0 {
            self.trend.draw(frame, rates);
        }
        frame.render_widget(Line::styled(self.title(), Style::new().add_modifier(Modifier::BOLD)), top);
        let (headings, lengths, least) =
            if narrow { (&SHORT[..], &SHORT_WIDTHS[..], 1) } else { (&HEADINGS[..], &WIDTHS[..], 20) };
        let widths = lengths.iter().copied().map(Constraint::Length).chain([Constraint::Min(least)]);
        let title = |heading: &&str| cell(heading, heading.trim_start_matches('>').to_owned());
        let heading = Row::new(headings.iter().map(title).collect::<Vec<_>>());
        let rows = self.look.look.connections.iter().map(|row| {
            let colour = if row.way == "ring" { Color::Green } else { Color::Yellow };
            let texts = if narrow { row.short_cells().to_vec() } else { row.cells().to_vec() };
            let cells = headings.iter().copied().zip(texts).map(|(heading, text)| match heading {
                "WAY" => cell(heading, text).style(Style::new().fg(colour)),
                _ => cell(heading, text),
            });
            Row::new(cells.collect::<Vec<_>>())
        });
        let table = Table::new(rows, widths)
            .header(heading.style(Style::new().add_modifier(Modifier::REVERSED)))
            .row_highlight_style(Style::new().add_modifier(Modifier::UNDERLINED));
        frame.render_stateful_widget(table, middle, &mut self.at);
        let foot = self.foot(narrow);
        frame.render_widget(Line::styled(foot, Style::new().fg(Color::DarkGray)), bottom);
    }

    fn title(&self) -> String {
        let rows = &self.look.look.connections;
        let on_ring = rows.iter().filter(|row| row.way == "ring").count();
        let rate: f64 = rows.iter().map(crate::connections::ConnectionRow::rate).sum();
        let held = if self.held { " (held)" } else { "" };
        let rate = human::rate(rate as u64, 1.0);
        let filter = match self.choice.filter.as_str() {
            "" => String::new(),
            text => format!(" with \"{text}\""),
        };
        let sort = self.choice.sort.word();
        format!("partywall: {} connections{filter}, {on_ring} on the ring, {rate} in sum, by {sort}{held}", rows.len())
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
    use crate::commands::stat::devices::DeviceTotals;
    use crate::connections::Look;

    fn key(code: KeyCode) -> Event {
        Event::Key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn view(rows: usize) -> View {
        let row = |n: usize| crate::connections::ConnectionRow {
            program: format!("program-{n}"),
            way: "tcp".into(),
            reason: Some(crate::connections::Cause::Idle),
            why: "because of it".into(),
            ..Default::default()
        };
        let connections = (0..rows).map(row).collect();
        View {
            look: TopLook { look: Look { connections, left_out: 0, notes: Vec::new() }, ..TopLook::default() },
            choice: TopChoice::default(),
            trend: RateTrend::default(),
            typing: false,
            held: false,
            at: TableState::default(),
        }
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
    fn terminal_with_room_shows_rates_as_sparklines() {
        let mut view = view(2);
        let rate =
            |n| crate::connections::DirectionCount { ring_rate: Some(n), tcp_rate: Some(0.0), ..Default::default() };
        for n in [1e6, 2e6] {
            view.look.look.connections[0].sent = Some(rate(n));
            view.trend.add(&view.look.look);
        }
        let mut terminal = Terminal::new(TestBackend::new(80, LOW)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let shown = terminal.backend().to_string();
        assert!(shown.contains("ring") && shown.contains("▄█") && shown.contains("2.00 MB/s"), "{shown}");
        assert!(!drawn(&mut view).contains('█'), "10 lines are for rows");
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
    fn terminal_of_80_columns_shows_way_and_whole_reason() {
        let mut view = view(2);
        view.look.look.connections[0].why = "the program also uses raw system calls or io_uring on it".into();
        view.look.look.connections[0].peer = "255.255.255.255:65535".into();
        let mut terminal = Terminal::new(TestBackend::new(80, 10)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let shown = terminal.backend().to_string();
        for words in ["program-0", "255.255.255.255:65535", "TRAFFIC", "tcp", "raw system calls or io_uring on it"] {
            assert!(shown.contains(words), "{words} is missing:\n{shown}");
        }
        assert!(!shown.contains("SAVED"), "{shown}");
    }

    #[test]
    fn keys_choose_order_and_filter() {
        let mut view = view(3);
        assert_eq!(view.handle(&key(KeyCode::Char('s'))), After::Look);
        assert_eq!(view.choice.sort, super::super::choice::RowOrder::Bytes);
        view.handle(&key(KeyCode::Char('/')));
        for letter in "qx".chars() {
            assert_eq!(view.handle(&key(KeyCode::Char(letter))), After::Look, "q is a letter here");
        }
        view.handle(&key(KeyCode::Backspace));
        assert!(drawn(&mut view).contains("filter: q_"));
        view.handle(&key(KeyCode::Enter));
        assert_eq!((view.choice.filter.as_str(), view.typing), ("q", false));
        assert!(drawn(&mut view).contains("with \"q\""));
        view.handle(&key(KeyCode::Char('/')));
        view.handle(&key(KeyCode::Esc));
        assert_eq!(view.choice.filter, "");
        assert_eq!(view.handle(&key(KeyCode::Char('q'))), After::Leave);
    }

    #[test]
    fn switches_and_disks_are_below_the_connections() {
        let mut view = view(2);
        let device = DeviceTotals::for_test("lan", &["a", "b", "c", "d"]);
        view.look.devices = device;
        let shown = drawn(&mut view);
        for words in ["program-1", "net lan/a  ", "net lan/b  ", "and 2 more switch ports"] {
            assert!(shown.contains(words), "{words} is missing:\n{shown}");
        }
        let last = |words: &str| shown.lines().position(|line| line.contains(words)).unwrap();
        assert!(last("program-1") < last("net lan/a") && last("net lan/a") < last("q leaves"), "{shown}");
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
