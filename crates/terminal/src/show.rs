//! What the demo tells: steps, the commands it runs, and how far it is.

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::process::Command;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Text goes to standard output, progress to standard error if that is a terminal.
#[derive(Debug)]
pub struct Show {
    spinner: Option<ProgressBar>,
    /// Commands are told: in a first round, and not again in the next.
    tells: Cell<bool>,
}

impl Default for Show {
    fn default() -> Self {
        Self::new()
    }
}

impl Show {
    /// One that tells commands.
    #[must_use]
    pub fn new() -> Self {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        });
        Self { spinner, tells: Cell::new(true) }
    }

    /// A line on standard output. Nobody reading it is no reason to stop and leave things behind.
    pub fn say(&self, line: &str) {
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
    pub fn step(&self, title: &str) {
        self.say(&format!("\n== {title}"));
    }

    /// A command, as one would type it at this prompt: in which machine, or nothing.
    pub fn command(&self, prompt: &str, line: &str) {
        if self.tells.get() {
            self.say(&format!("   {prompt}$ {line}"));
        }
    }

    /// Whether the commands that follow are told.
    pub fn tell_commands(&self, yes: bool) {
        self.tells.set(yes);
    }

    /// What is going on, and for how long.
    pub fn busy(&self, what: &str) {
        if let Some(spinner) = &self.spinner {
            spinner.reset_elapsed();
            spinner.set_message(what.to_owned());
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
    }

    /// Nothing is.
    pub fn quiet(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.disable_steady_tick();
            spinner.finish_and_clear();
        }
    }
}

/// A command line for a shell.
#[must_use]
pub fn typed(command: &Command) -> String {
    std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_pasted_into_a_shell() {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", "a b", "it's"]);
        assert_eq!(typed(&command), r"ip netns exec 'a b' 'it'\''s'");
    }
}
