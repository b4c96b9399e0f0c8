//! The storage appliance: its measurement, and one to look at.

mod measure;
mod up;

use partywall_lab::nas::NasKind;
use std::error::Error;
use std::process::ExitCode;

/// The exit code where machines cannot be booted (`EX_UNAVAILABLE` of sysexits.h).
const UNAVAILABLE: u8 = 69;

/// Builds a storage appliance of four machines and a client that mounts it by NFS: to look at with `up`, or to measure.
///
/// Without a command it measures, as `measure` does.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<NasCommand>,
    #[command(flatten)]
    measure: measure::NasMeasureArgs,
}

#[derive(Debug, clap::Subcommand)]
enum NasCommand {
    /// Build an appliance, mount it on the client, and keep it until Ctrl-C.
    ///
    /// `partywall-lab shell NAME` opens a shell in a machine. The appliance takes root (a bridge), up to 4 GiB of memory, and some minutes
    /// without KVM.
    Up(up::NasUpArgs),
    /// Measure the appliance beside two other forms of it.
    Measure(measure::NasMeasureArgs),
}

/// A form of the appliance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FormArg {
    Partywall,
    Monolith,
    Bridge,
}

impl From<FormArg> for NasKind {
    fn from(form: FormArg) -> Self {
        match form {
            FormArg::Partywall => Self::Partywall,
            FormArg::Monolith => Self::Monolith,
            FormArg::Bridge => Self::Bridge,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    match &args.command {
        Some(NasCommand::Up(up)) => up::run(up),
        Some(NasCommand::Measure(measure)) => measure::run(measure),
        None => measure::run(&args.measure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        nas: Args,
    }

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Program::try_parse_from(["nas"].into_iter().chain(line.split_whitespace())).map(|program| program.nas)
    }

    #[test]
    fn options_without_a_command_are_those_of_measure() {
        let plain = parse("--runs 1 --form partywall --load fio").unwrap();
        assert!(plain.command.is_none(), "{plain:?}");
        let Some(NasCommand::Measure(named)) = parse("measure --runs 1 --form partywall --load fio").unwrap().command
        else {
            panic!("`measure` is another command");
        };
        assert_eq!(format!("{:?}", plain.measure), format!("{named:?}"));
        assert!(format!("{named:?}").contains("forms: [Partywall]"), "{named:?}");
    }

    #[test]
    fn up_takes_one_form_and_no_option_of_measure() {
        let form = |line: &str| match parse(line).unwrap().command {
            Some(NasCommand::Up(up)) => up.form(),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(form("up"), NasKind::Partywall);
        assert_eq!(form("up --form bridge"), NasKind::Bridge);
        for wrong in ["up --runs 1", "--runs 1 up", "up --form monolith --form bridge"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn help_names_both_commands_and_the_shell() {
        Program::command().debug_assert();
        let mut program = Program::command();
        let help = program.render_long_help().to_string();
        for word in ["up", "measure", "--runs"] {
            assert!(help.split_whitespace().any(|each| each == word), "{word} in {help}");
        }
        let up = program.find_subcommand_mut("up").unwrap().render_long_help().to_string();
        // Lines are wrapped.
        let up = up.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(up.contains("`partywall-lab shell NAME`") && up.contains("--form"), "{up}");
    }
}
