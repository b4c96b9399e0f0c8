//! `partywall tcp-cat`, hidden: a file over TCP, read and written as `cat` does, for the demo to compare with.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;

use crate::args::pin;
use crate::exit::{CommandFailure, Context};
use crate::output;
use crate::progress::{ByteMeter, Meter, TransferReport};

/// As large as the pieces of `cat`.
const PIECE: usize = 256 << 10;

/// Carry a file over TCP: the connecting side sends, the listening side receives
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address and port to connect to, or with -l to listen on (port 0 takes a free one)
    address: SocketAddr,

    /// Receive one connection; the address is printed once it can be connected to
    #[arg(short, long)]
    listen: bool,

    /// File to send
    #[arg(short, long, value_name = "FILE", required_unless_present = "listen")]
    input: Option<PathBuf>,

    /// File to write what is received to
    #[arg(short, long, value_name = "FILE", required_if_eq("listen", "true"))]
    output: Option<PathBuf>,

    /// Print bytes and seconds to standard error, as a line of JSON
    #[arg(long)]
    report: bool,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    pin(args.cpu)?;
    let meter = match (&args.input, &args.output) {
        (_, Some(path)) if args.listen => {
            let listener =
                TcpListener::bind(args.address).context(format_args!("cannot listen on {}", args.address))?;
            output::print(listener.local_addr()?)?;
            let (stream, _) = listener.accept()?;
            let mut file = File::create(path).context(format_args!("cannot write {}", path.display()))?;
            let meter = Meter::start();
            copy(&stream, &mut file, &meter, &meter.received)?;
            meter
        }
        (Some(path), _) => {
            let mut file = File::open(path).context(format_args!("cannot open {}", path.display()))?;
            let stream =
                TcpStream::connect(args.address).context(format_args!("cannot connect to {}", args.address))?;
            let meter = Meter::start();
            copy(&mut file, &stream, &meter, &meter.sent)?;
            stream.shutdown(Shutdown::Write)?;
            meter
        }
        (None, _) => return Err(CommandFailure::usage("--input or --listen and --output are needed")),
    };
    if args.report {
        TransferReport::of(&meter).print();
    }
    Ok(())
}

/// With a buffer of our own: `std::io::copy` would use `splice`, and compare the kernel with itself.
fn copy(mut from: impl Read, mut to: impl Write, meter: &Meter, flow: &ByteMeter) -> Result<(), CommandFailure> {
    let mut piece = vec![0u8; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            n => {
                to.write_all(&piece[..n])?;
                meter.add(flow, n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_transfers_and_counts_all_bytes() {
        let payload = vec![7u8; PIECE + 12345];
        let (meter, mut out) = (Meter::start(), Vec::new());
        copy(&payload[..], &mut out, &meter, &meter.received).unwrap();
        assert_eq!(out, payload);
        assert_eq!(meter.received.bytes(), payload.len() as u64);
    }
}
