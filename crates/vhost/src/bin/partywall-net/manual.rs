//! The page partywall-net.toml(5) of the manual, from the sample file.

use clap_mangen::roff::{Roff, bold, roman};
use partywall_vhost::config::SAMPLE_CONFIG;
use std::io;

const SEE_ALSO: &str = "partywall(1), partywall-net(1)";

/// The page, as roff.
pub(crate) fn config_page() -> io::Result<Vec<u8>> {
    let mut roff = Roff::new();
    roff.control("TH", ["partywall-net.toml", "5"]);
    roff.control("SH", ["NAME"]).text([roman("partywall-net.toml - the ports of a network switch of Partywall")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold("/etc/partywall/net/NAME.toml"), roman(", or the file of "), bold("partywall net run --config")]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(
        "A TOML file that fixes the ports of one switch and their limits. A switch reads it when it starts, at SIGHUP, and at \
         partywall net reload. Below is the sample file, as partywall net --print-sample-config prints it.",
    )]);
    roff.control("PP", []).control("nf", []);
    for line in SAMPLE_CONFIG.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.control("SH", ["SEE ALSO"]).text([roman(SEE_ALSO)]);
    let mut page = Vec::new();
    roff.to_writer(&mut page)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_of_the_switch_has_every_key_of_the_sample() {
        let page = String::from_utf8(config_page().unwrap()).unwrap().replace("\\-", "-");
        assert!(page.contains(".TH partywall-net.toml 5") && page.contains("partywall-net(1)"), "{page}");
        for key in ["floods", "age", "hold", "other_ports", "[[port]]", "name", "mac", "ip", "rate", "owner", "tap"] {
            assert!(page.lines().any(|line| line.trim_start_matches("# ").starts_with(key)), "{key}:\n{page}");
        }
    }
}
