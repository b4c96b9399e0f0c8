//! Cap'n Proto's RPC over streams of Partywall: the three functions that a project needs.
//!
//! - [`connect`] gives the first object of the other side.
//! - [`serve`] gives an object to the other side, for each connection that [`incoming`] brings.
//! - [`Echo`] is an example object. `src/bin/` has its server and its client.
//!
//! Cap'n Proto's objects belong to one thread, so all of this runs in a `tokio::task::LocalSet`.

use capnp_rpc::rpc_twoparty_capnp::Side;
use capnp_rpc::{RpcSystem, twoparty};
use echo_capnp::{counter, echo};
use partywall::asynchronous::{AsyncReadHalf, AsyncStream};
use partywall::{Error, Listener, PeerInfo, Stream};
use std::cell::Cell;
use std::rc::Rc;
use tokio::sync::mpsc;
use tokio_util::compat::{Compat, TokioAsyncReadCompatExt, TokioAsyncWriteCompatExt};

capnp::generated_code!(pub mod echo_capnp);

fn network(stream: AsyncStream, side: Side) -> Box<twoparty::VatNetwork<Compat<AsyncReadHalf>>> {
    let (read, write) = stream.into_halves();
    Box::new(twoparty::VatNetwork::new(read.compat(), write.compat_write(), side, Default::default()))
}

/// The first object of the other side, and the system that has to run (`spawn_local`) while the object is used.
pub fn connect<C: capnp::capability::FromClientHook>(stream: AsyncStream) -> (C, RpcSystem<Side>) {
    let mut system = RpcSystem::new(network(stream, Side::Client), None);
    (system.bootstrap(Side::Server), system)
}

/// Gives an object to the other side. The result runs (`spawn_local`) until the other side has gone.
pub fn serve(stream: AsyncStream, object: impl Into<capnp::capability::Client>) -> RpcSystem<Side> {
    RpcSystem::new(network(stream, Side::Server), Some(object.into()))
}

/// Connections of a listener. A thread accepts them until the receiver is dropped, or the listener fails.
pub fn incoming(mut listener: Listener) -> mpsc::Receiver<partywall::Result<(Stream, PeerInfo)>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        loop {
            let accepted = listener.accept();
            // Without memory or descriptors for one connection, the next may be accepted.
            if let Err(Error::Memory(_) | Error::System { .. }) = accepted {
                continue;
            }
            let is_over = accepted.is_err();
            if sender.blocking_send(accepted).is_err() || is_over {
                return;
            }
        }
    });
    receiver
}

/// Serves an [`Echo`] to each connection. Runs in a `LocalSet`, and ends with the listener.
///
/// # Errors
/// Why the listener accepts no more.
pub async fn serve_echo(listener: Listener) -> partywall::Result<()> {
    let mut incoming = incoming(listener);
    while let Some(accepted) = incoming.recv().await {
        let (stream, peer) = accepted?;
        // A one-way stream, or the end of a connection, affects only that connection.
        let Ok(stream) = AsyncStream::new(stream) else { continue };
        let object: echo::Client = capnp_rpc::new_client(Echo { caller: peer.name });
        tokio::task::spawn_local(serve(stream, object.client));
    }
    Ok(())
}

/// The object that each connection gets.
#[derive(Debug)]
pub struct Echo {
    /// The domain of the caller, as the broker vouches for it.
    caller: String,
}

impl echo::Server for Echo {
    async fn say(self: Rc<Self>, params: echo::SayParams, mut results: echo::SayResults) -> Result<(), capnp::Error> {
        let text = params.get()?.get_text()?.to_str()?;
        if text.is_empty() {
            return Err(capnp::Error::failed("no words".into()));
        }
        results.get().set_text(format!("{text}, {}", self.caller));
        Ok(())
    }

    async fn counter(
        self: Rc<Self>,
        _: echo::CounterParams,
        mut results: echo::CounterResults,
    ) -> Result<(), capnp::Error> {
        results.get().set_counter(capnp_rpc::new_client(Counter::default()));
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Counter {
    value: Cell<u64>,
}

impl counter::Server for Counter {
    async fn next(
        self: Rc<Self>,
        _: counter::NextParams,
        mut results: counter::NextResults,
    ) -> Result<(), capnp::Error> {
        self.value.set(self.value.get() + 1);
        results.get().set_value(self.value.get());
        Ok(())
    }
}
