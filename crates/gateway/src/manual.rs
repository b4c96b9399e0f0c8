//! Manual pages and completions that the program prints, from the same source as `--help`.

use std::io;

use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::roff::{Roff, roman};

use crate::cli::GatewayArguments;

/// The name of the program.
const PROGRAM: &str = "partywall-gateway";

const SEE_ALSO: &str =
    "partywall(1), partywalld(8), partywalld.toml(5), partywall-gateway(8), partywall-gateway-certificates(8)";

/// A page of the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GatewayManualPage {
    /// partywall-gateway(8)
    Gateway,
    /// partywall-gateway-certificates(8)
    Certificates,
}

/// A page, as roff.
pub(crate) fn page(page: GatewayManualPage) -> io::Result<Vec<u8>> {
    let mut command = GatewayArguments::command().disable_help_subcommand(true);
    command.build();
    if page == GatewayManualPage::Certificates {
        let found = command.find_subcommand("certificates").cloned();
        command = found.ok_or_else(|| io::Error::other("there is no such subcommand"))?;
        command = command.name("partywall-gateway-certificates").version(env!("CARGO_PKG_VERSION"));
    }
    let mut roff = Vec::new();
    clap_mangen::Man::new(command).section("8").render(&mut roff)?;
    let mut see = Roff::new();
    see.control("SH", ["SEE ALSO"]).text([roman(SEE_ALSO)]);
    see.to_writer(&mut roff)?;
    Ok(roff)
}

/// A completion script.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut GatewayArguments::command(), PROGRAM, &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_their_options_and_names() {
        for (of, words) in [
            (GatewayManualPage::Gateway, [".TH partywall-gateway 8", "check", "partywall-gateway\\-certificates(8)"]),
            (GatewayManualPage::Certificates, [".TH partywall-gateway-certificates 8", "days", "HOST"]),
        ] {
            let text = String::from_utf8(page(of).unwrap()).unwrap();
            for word in words {
                assert!(text.replace("\\-", "-").contains(&word.replace("\\-", "-")), "{word} is missing:\n{text}");
            }
        }
    }

    #[test]
    fn completions_of_each_shell_know_options_and_subcommand() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completions(shell)).unwrap();
            for word in ["partywall-gateway", "certificates", "config", "days"] {
                assert!(script.contains(word), "{word} is missing in the script of {shell}");
            }
        }
    }
}
