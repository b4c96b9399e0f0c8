//! Manual pages and completions that the program prints, from the same sources as `--help` and the sample policy.

use std::io;

use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::DaemonArguments;

/// Every key of a policy file, explained.
pub(crate) const SAMPLE_POLICY: &str = include_str!("../partywalld.toml");

/// The line between two paragraphs of a comment.
const BREAK: &str = "#";

/// A page of the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ManualPage {
    /// partywalld(8)
    Broker,
    /// partywalld.toml(5)
    Policy,
}

const SEE_ALSO: &str = "partywall(1), partywalld(8), partywalld.toml(5)";

/// A page, as roff.
pub(crate) fn page(page: ManualPage) -> io::Result<Vec<u8>> {
    let mut roff = Vec::new();
    match page {
        ManualPage::Broker => {
            clap_mangen::Man::new(DaemonArguments::command()).section("8").render(&mut roff)?;
            let mut see = Roff::new();
            see.control("SH", ["SEE ALSO"]).text([roman(SEE_ALSO)]);
            see.to_writer(&mut roff)?;
        }
        ManualPage::Policy => policy_page().to_writer(&mut roff)?,
    }
    Ok(roff)
}

/// A completion script.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut DaemonArguments::command(), "partywalld", &mut script);
    script
}

/// The sample policy as a page: its comments become text, and its keys are printed unchanged.
fn policy_page() -> Roff {
    let mut roff = Roff::new();
    roff.control("TH", ["partywalld.toml", "5"]);
    roff.control("SH", ["NAME"]).text([roman("partywalld.toml - the policy of the Partywall broker")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold("/etc/partywall/partywalld.toml"), roman(", or the file of "), bold("partywalld --policy")]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(
        "The policy decides which users may join as which domains, which domains may connect, the limits of each domain, and when \
         connections of unmodified programs move to shared memory. It is a TOML file. Without one, root and the user who runs the \
         broker may do everything. Other users may do nothing. Below is the sample file, as partywalld --print-sample-policy prints it.",
    )]);
    for block in SAMPLE_POLICY.split("\n\n") {
        let mut lines = block.lines().peekable();
        if let Some(name) = block.lines().find_map(table_name) {
            roff.control("SH", [name]);
        } else {
            roff.control("PP", []);
        }
        while let Some(line) = lines.next() {
            if is_text(line) {
                roff.text([roman(line.trim_start_matches(['#', ' ']))]);
                continue;
            }
            if line == BREAK {
                roff.control("PP", []);
                continue;
            }
            roff.control("RS", ["4"]).control("nf", []);
            roff.text([roman(line)]);
            while let Some(line) = lines.next_if(|line| !is_text(line) && *line != BREAK) {
                roff.text([roman(line)]);
            }
            roff.control("fi", []).control("RE", []);
        }
    }
    roff.control("SH", ["SEE ALSO"]).text([roman(SEE_ALSO)]);
    roff
}

/// Whether a line is text. A key, a table and an empty line are not, and neither is a key that is commented out.
fn is_text(line: &str) -> bool {
    line.strip_prefix("# ").is_some_and(|rest| {
        let first = rest.split([' ', '=']).next().unwrap_or_default();
        !rest.starts_with(['[', ' ']) && !rest.strip_prefix(first).is_some_and(|rest| rest.starts_with(" = "))
    })
}

/// `[[join]]`, from the line that begins that table, commented out or not.
fn table_name(line: &str) -> Option<&str> {
    let line = line.strip_prefix("# ").unwrap_or(line);
    (line.starts_with('[') && line.ends_with(']')).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(of: ManualPage) -> String {
        String::from_utf8(page(of).unwrap()).unwrap()
    }

    #[test]
    fn page_of_the_broker_has_its_options_and_codes() {
        let text = text(ManualPage::Broker);
        for word in [".TH partywalld 8", "check\\-policy", "SIGHUP", "partywalld.toml(5)"] {
            assert!(text.contains(word), "{word} is missing:\n{text}");
        }
    }

    #[test]
    fn page_of_the_policy_has_every_key_of_the_sample() {
        let page = text(ManualPage::Policy).replace("\\-", "-");
        assert!(page.starts_with(".ie") || page.contains(".TH partywalld.toml 5"), "{page}");
        assert!(page.lines().all(|line| line != BREAK), "an empty comment is shown as a key:\n{page}");
        let mut keys = 0;
        for line in SAMPLE_POLICY.lines().filter(|line| !line.is_empty() && *line != BREAK && !is_text(line)) {
            let key = line.split(" = ").next().unwrap_or_default();
            assert!(page.contains(key), "{key} is missing:\n{page}");
            keys += 1;
        }
        assert!(keys > 25, "{keys}");
        for table in ["[quota]", "[[join]]", "[[connect]]", "[sockets]", "[programs]", "[[machine]]", "[[group]]"] {
            assert!(page.lines().any(|line| line.starts_with(".SH") && line.contains(table)), "{table}:\n{page}");
        }
    }

    #[test]
    fn commented_key_is_no_text() {
        for (line, text) in [
            ("# Who may join as what.", true),
            ("# name = \"vm-web\"", false),
            ("# [[machine]]", false),
            ("#     partywalld --check-policy", false),
            ("administrators = [\"root\"]", false),
            ("", false),
        ] {
            assert_eq!(is_text(line), text, "{line}");
        }
    }
}
