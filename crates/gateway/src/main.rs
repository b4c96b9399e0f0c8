//! `partywall-gateway`: shares this host's names with a cluster of hosts, and carries streams between them.

mod cli;
mod manual;

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use cli::{Command, GatewayArguments};
use partywall_gateway::config::{GatewayConfig, SAMPLE_CONFIG};
use partywall_gateway::{GatewayError, certificates};
use partywall_terminal::{end, log_to_stderr};

/// Keeps freed memory for a while. The allocator of glibc gives memory back to the kernel and takes it again with nearly each datagram.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    log_to_stderr("info");
    end("partywall-gateway", run(GatewayArguments::parse()))
}

fn run(arguments: GatewayArguments) -> Result<(), GatewayError> {
    match arguments.command {
        Some(Command::Certificates { folder, hosts, days }) => {
            certificates::make(&folder, &hosts, days)?;
            let folder = folder.display();
            println!("certificates of {} are in {folder}; keep {folder}/ca.key apart", hosts.join(", "));
            Ok(())
        }
        None => {
            let run = arguments.run;
            if let Some(page) = run.print_manual {
                let page = manual::page(page);
                return print(&page.map_err(|source| GatewayError::System { doing: "make the manual page", source })?);
            }
            if run.print_sample_config {
                return print(SAMPLE_CONFIG.as_bytes());
            }
            if let Some(shell) = run.print_completions {
                return print(&manual::completions(shell));
            }
            let config = GatewayConfig::read(&run.config)?;
            if run.check { Ok(()) } else { partywall_gateway::run(&config) }
        }
    }
}

fn print(bytes: &[u8]) -> Result<(), GatewayError> {
    match io::stdout().write_all(bytes) {
        // A pager that has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(source) => Err(GatewayError::System { doing: "write to standard output", source }),
        Ok(()) => Ok(()),
    }
}
