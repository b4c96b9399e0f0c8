//! What the demo tells: steps, commands, and how far it is.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Text goes to standard output, progress to standard error if that is a terminal.
#[derive(Debug)]
pub(super) struct Show {
    spinner: Option<ProgressBar>,
    tells: Cell<bool>,
}

impl Show {
    pub(super) fn new() -> Self {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        });
        Self { spinner, tells: Cell::new(true) }
    }

    /// A line. Nobody reading it is no reason to stop and leave things behind.
    pub(super) fn say(&self, line: &str) {
        let print = || {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        };
        match &self.spinner {
            Some(spinner) => spinner.suspend(print),
            None => print(),
        }
    }

    /// What comes now.
    pub(super) fn step(&self, title: &str) {
        self.say(&format!("\n== {title}"));
    }

    /// A command, in which machine (or on the host), as one would type it.
    pub(super) fn command(&self, machine: &str, line: &str) {
        if self.tells.get() {
            self.say(&format!("   {machine}$ {line}"));
        }
    }

    /// Whether the commands that follow are told.
    pub(super) fn tell_commands(&self, yes: bool) {
        self.tells.set(yes);
    }

    /// What is going on, and for how long.
    pub(super) fn busy(&self, what: &str) {
        if let Some(spinner) = &self.spinner {
            spinner.reset_elapsed();
            spinner.set_message(what.to_owned());
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
    }

    /// Nothing is.
    pub(super) fn quiet(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.disable_steady_tick();
            spinner.finish_and_clear();
        }
    }
}
