//! The output of a demo: its steps, the commands it runs, and its progress.

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::process::Command;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::text::{printable, printable_lines};

/// Text goes to standard output, progress to standard error if that is a terminal.
#[derive(Debug)]
pub struct Show {
    spinner: Option<ProgressBar>,
    /// Whether commands are shown: in the first round, and not again in the next.
    shows_commands: Cell<bool>,
}

impl Default for Show {
    fn default() -> Self {
        Self::new()
    }
}

impl Show {
    /// Commands are shown until [`Show::show_commands`] says otherwise.
    #[must_use]
    pub fn new() -> Self {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        });
        Self { spinner, shows_commands: Cell::new(true) }
    }

    /// Prints a line on standard output. A closed output is ignored: the demo must still clean up.
    pub fn say(&self, line: &str) {
        let line = printable_lines(line);
        let print = || {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        };
        match &self.spinner {
            Some(spinner) => spinner.suspend(print),
            None => print(),
        }
    }

    /// Prints the title of the next step.
    pub fn step(&self, title: &str) {
        self.say(&format!("\n== {title}"));
    }

    /// Prints a command as a user would type it. The prompt names the virtual machine, or is empty on the host.
    pub fn command(&self, prompt: &str, line: &str) {
        if self.shows_commands.get() {
            self.say(&format!("   {prompt}$ {line}"));
        }
    }

    /// Sets whether the commands that follow are shown.
    pub fn show_commands(&self, yes: bool) {
        self.shows_commands.set(yes);
    }

    /// Shows what is in progress, and since when.
    pub fn busy(&self, what: &str) {
        if let Some(spinner) = &self.spinner {
            spinner.reset_elapsed();
            spinner.set_message(printable(what).into_owned());
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
    }

    /// Removes the progress line.
    pub fn quiet(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.disable_steady_tick();
            spinner.finish_and_clear();
        }
    }
}

/// The command as a line that a shell accepts.
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
