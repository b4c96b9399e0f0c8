//! Checks on the source tree that the compiler cannot make: `cargo xtask <check>`.
//!
//! Each check is a module with one function from the tree to a [`Report`]; the part that judges is separate from the
//! part that reads, so that it is tested on small fixtures. `make check` runs them all.

mod edges;
mod english;
mod error;
mod examples;
mod glossary;
mod layers;
mod licences;
mod links;
mod protocol;
mod report;
mod source;
mod tree;
mod unsafety;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::error::Error;
use crate::report::Report;
use crate::tree::Tree;

#[derive(Parser)]
#[command(about = "Checks on the source tree", disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    check: Check,
}

/// The checks there are. Their names are what SPECIFICATION.md may cite as `cargo xtask <name>`.
#[derive(Clone, Copy, Subcommand, ValueEnum)]
enum Check {
    /// Crates, and modules inside libraries, depend on one another only along the arrows of the design.
    Layers,
    /// Every use of `unsafe` is opted into with a reason and says why it is sound.
    Unsafe,
    /// Every release and acquire on shared memory names its edge, and every edge has both ends.
    Edges,
    /// Every dependency has a licence that deny.toml allows.
    Licences,
    /// Everything that the documents link to and name exists.
    Links,
    /// Clauses of docs/protocol.md that code names exist; lists those that no code names.
    Protocol,
    /// No file has a phrase that makes a reader stop.
    English,
    /// Every public item of the library has an example.
    Examples,
    /// No two types share a name, except those that are listed; the glossary is true.
    Glossary,
    /// All of the above.
    All,
}

impl Check {
    fn run(self, tree: &Tree) -> Result<Vec<Report>, Error> {
        Ok(match self {
            Check::Layers => vec![layers::check(tree)?],
            Check::Unsafe => vec![unsafety::check(tree)?],
            Check::Edges => vec![edges::check(tree)?],
            Check::Licences => vec![licences::check(tree)?],
            Check::Links => vec![links::check(tree)?],
            Check::Protocol => vec![protocol::check(tree)?],
            Check::English => vec![english::check(tree)?],
            Check::Examples => vec![examples::check(tree)?],
            Check::Glossary => vec![glossary::check(tree)?],
            Check::All => Check::value_variants()
                .iter()
                .filter(|check| !matches!(check, Check::All))
                .map(|check| check.run(tree))
                .collect::<Result<Vec<_>, _>>()?
                .concat(),
        })
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let reports = match Tree::this_workspace().and_then(|tree| args.check.run(&tree)) {
        Ok(reports) => reports,
        Err(error) => {
            eprintln!("xtask: {error}");
            return ExitCode::from(2);
        }
    };
    for report in &reports {
        print!("{report}");
    }
    if reports.iter().all(Report::is_clean) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
