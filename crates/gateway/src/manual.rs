//! Manual pages and completions that the program prints, from the same source as `--help`.

use std::io;

use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::roff::{Roff, bold, roman};
use partywall_gateway::config::SAMPLE_CONFIG;

use crate::cli::GatewayArguments;

/// The name of the program.
const PROGRAM: &str = "partywall-gateway";

const SEE_ALSO: &str = "partywall(1), partywalld(8), partywalld.toml(5), partywall-gateway(8), partywall-gateway-certificates(8), partywall-gateway.toml(5)";

/// A page of the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GatewayManualPage {
    /// partywall-gateway(8)
    Gateway,
    /// partywall-gateway-certificates(8)
    Certificates,
    /// partywall-gateway.toml(5)
    Config,
}

/// A page, as roff.
pub(crate) fn page(page: GatewayManualPage) -> io::Result<Vec<u8>> {
    let mut command = GatewayArguments::command().disable_help_subcommand(true);
    command.build();
    let mut roff = Vec::new();
    match page {
        GatewayManualPage::Gateway => clap_mangen::Man::new(command).section("8").render(&mut roff)?,
        GatewayManualPage::Certificates => {
            let found = command.find_subcommand("certificates").cloned();
            let command = found.ok_or_else(|| io::Error::other("there is no such subcommand"))?;
            let command = command.name("partywall-gateway-certificates").version(env!("CARGO_PKG_VERSION"));
            clap_mangen::Man::new(command).section("8").render(&mut roff)?;
        }
        GatewayManualPage::Config => config_page().to_writer(&mut roff)?,
    }
    let mut see = Roff::new();
    see.control("SH", ["SEE ALSO"]).text([roman(SEE_ALSO)]);
    see.to_writer(&mut roff)?;
    Ok(roff)
}

/// The sample configuration as a page.
fn config_page() -> Roff {
    let mut roff = Roff::new();
    roff.control("TH", ["partywall-gateway.toml", "5"]);
    roff.control("SH", ["NAME"]).text([roman("partywall-gateway.toml - the configuration of the Partywall gateway")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold("/etc/partywall/gateway.toml"), roman(", or the file of "), bold("partywall-gateway --config")]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman("A TOML file. Below is the sample file, as partywall-gateway --print-sample-config prints it.")]);
    roff.control("PP", []).control("nf", []);
    for line in SAMPLE_CONFIG.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff
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
            (GatewayManualPage::Config, [".TH partywall-gateway.toml 5", "stream_window = 1048576", "# [metrics]"]),
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
