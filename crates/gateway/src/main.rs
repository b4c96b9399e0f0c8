//! `partywall-gateway`: shares this host's names with a cluster of hosts, and carries streams between them.

mod cli;
mod manual;

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use cli::{Command, GatewayArguments};
use partywall_gateway::config::{GatewayConfig, SAMPLE_CONFIG};
use partywall_gateway::{GatewayError, certificates};
use partywall_terminal::{end, log_of_service_to_stderr};

/// Keeps freed memory for a while. The allocator of glibc gives memory back to the kernel and takes it again with nearly each datagram.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    log_of_service_to_stderr("info");
    end("partywall-gateway", run(GatewayArguments::parse()))
}

fn run(arguments: GatewayArguments) -> Result<(), GatewayError> {
    match arguments.command {
        Some(Command::Certificates { folder, hosts, days }) => {
            let made = certificates::make(&folder, &hosts, days)?;
            let (kept, folder) = (hosts.iter().filter(|host| !made.contains(host)), folder.display());
            for host in kept {
                println!("{folder}/{host}.pem and its key exist, and are kept; move both away to have new ones made");
            }
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
            let config = GatewayConfig::read(&run.config).map_err(explain)?;
            if run.check { Ok(()) } else { partywall_gateway::run(&config) }
        }
    }
}

/// Adds the remedy to the error of a configuration file that is not there.
fn explain(error: GatewayError) -> GatewayError {
    match error {
        GatewayError::File { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
            let remedy = "name another file by --config, or write it from what --print-sample-config prints";
            GatewayError::Config { path, reason: format!("there is no such file; {remedy}") }
        }
        other => other,
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
