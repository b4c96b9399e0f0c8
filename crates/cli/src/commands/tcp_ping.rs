//! `partywall tcp-ping`, hidden: what `ping` measures, over TCP, for the demo to compare with.

use std::net::{SocketAddr, TcpListener, TcpStream};

use super::ping::{MeasureArgs, exchange};
use crate::args::pin;
use crate::exit::{CommandFailure, Context};
use crate::output;

/// Measure the round trip over TCP, in the same way as `ping`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address and port to connect to, or with -l to listen on (port 0 takes a free one)
    address: SocketAddr,

    /// Answer one connection; the address is printed once it can be connected to
    #[arg(short, long)]
    listen: bool,

    #[command(flatten)]
    measure: MeasureArgs,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    pin(args.cpu)?;
    if args.listen {
        let listener = TcpListener::bind(args.address).context(format_args!("cannot listen on {}", args.address))?;
        output::print(listener.local_addr()?)?;
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        return exchange::respond(&mut stream);
    }
    let plan = args.measure.plan()?;
    let mut stream = TcpStream::connect(args.address).context(format_args!("cannot connect to {}", args.address))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(args.measure.patience()?))?;
    let results = exchange::measure(&mut stream, &plan)?;
    args.measure.print(&args.address.to_string(), &results)
}
