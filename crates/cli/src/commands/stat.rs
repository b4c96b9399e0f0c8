//! `partywall list`: what the broker knows of.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}
pub(crate) fn run(_: &crate::args::Global, _: &Args) -> Result<(), crate::exit::Failure> { Ok(()) }
