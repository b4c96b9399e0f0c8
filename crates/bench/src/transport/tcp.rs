//! TCP over loopback, between two network namespaces joined by a veth pair, and between two virtual machines.

use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::OwnedFd,
};

use super::descriptor::twice;
use crate::{
    control::Beat,
    error::{BenchError, During, Result},
    mechanism::Tuning,
    netns::Namespaces,
    task::{Inside, MeasuringSide, MeasuringTask},
};

/// Over the loopback interface.
pub(super) fn connect(tuning: &Tuning) -> Result<[Vec<OwnedFd>; 2]> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).during("listening on the loopback interface")?;
    let address = listener.local_addr().during("listening on the loopback interface")?;
    let active = TcpStream::connect(address).during("connecting over the loopback interface")?;
    accept(&listener, active, tuning)
}

/// Between the two namespaces.
pub(super) fn connect_between(namespaces: Option<&Namespaces>, tuning: &Tuning) -> Result<[Vec<OwnedFd>; 2]> {
    let namespaces = namespaces.ok_or_else(|| BenchError::Unavailable("there are no network namespaces".into()))?;
    let [_, server_address] = namespaces.ends().addresses;
    let listener =
        namespaces.within(1, || TcpListener::bind((server_address, 0)).during("listening in a network namespace"))?;
    let address = listener.local_addr().during("listening in a network namespace")?;
    let active =
        namespaces.within(0, || TcpStream::connect(address).during("connecting between network namespaces"))?;
    accept(&listener, active, tuning)
}

fn accept(listener: &TcpListener, active: TcpStream, tuning: &Tuning) -> Result<[Vec<OwnedFd>; 2]> {
    let (passive, from) = listener.accept().during("accepting a TCP connection")?;
    let expected = active.local_addr().during("accepting a TCP connection")?;
    if from != expected {
        return Err(BenchError::Transport(format!("a stranger connected to the bench's TCP port: {from}")));
    }
    for stream in [&active, &passive] {
        stream.set_nodelay(tuning.prompt).during("setting TCP_NODELAY")?;
    }
    Ok([twice(active.into())?, twice(passive.into())?])
}

/// This side's end of a connection between two virtual machines.
pub(super) fn connect_machines(task: &MeasuringTask, place: &Inside, beat: &Beat) -> Result<Vec<OwnedFd>> {
    let address =
        place.passive_address.ok_or_else(|| BenchError::Unavailable("the machines have no network".into()))?;
    let stream = match task.side {
        MeasuringSide::Passive => {
            let listener = TcpListener::bind((address, 0)).during(format!("listening on {address}"))?;
            beat.tell(listener.local_addr().during("listening")?.port().into())?;
            listener.accept().during("accepting a TCP connection")?.0
        }
        MeasuringSide::Active => {
            let port = u16::try_from(beat.hear()?).unwrap_or(0);
            TcpStream::connect((address, port)).during(format!("connecting to {address}"))?
        }
    };
    stream.set_nodelay(task.tuning.prompt).during("setting TCP_NODELAY")?;
    twice(stream.into())
}
