//! Tools of the host, run to their end.

use crate::LabError;
use std::ffi::OsStr;
use std::process::Command;

/// The tools that run guests in any case.
const NEEDED: &[&str] = &["qemu-system-x86_64", "setpriv"];

/// Whether the tools are there that every guest needs: an error names the one that is not.
pub fn check_tools() -> Result<(), LabError> {
    NEEDED.iter().try_for_each(|tool| run(tool, ["--version"]).map(drop))
}

/// Runs a tool and returns what it printed.
pub(crate) fn run<A: AsRef<OsStr>>(tool: &str, args: impl IntoIterator<Item = A>) -> Result<String, LabError> {
    run_command(tool, Command::new(tool).args(args))
}

/// Runs a prepared command.
pub(crate) fn run_command(tool: &str, command: &mut Command) -> Result<String, LabError> {
    // An ordinary user's path may lack the system folders; messages are wanted in one language.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = command.env("PATH", path).env("LC_ALL", "C").output().map_err(|e| LabError::tool(tool, e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = said.trim().lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(LabError::tool(tool, format!("{}: {}", output.status, last.join(" / "))))
}
