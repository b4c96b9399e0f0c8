//! Carries a stream between a channel of this host and a stream to another host, both ways.
//!
//! Each direction is a task. It reads only as fast as the other side takes bytes, so a slow reader slows down its writer and nothing else.
//! It passes on every end as what it is: an orderly end, a reader that closes, and a death (protocol H6).

use partywall::asynchronous::{AsyncReadHalf, AsyncWriteHalf};
use partywall::{ReadHalf, Stream, WriteHalf};
use quinn::{RecvStream, SendStream, WriteError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::counters::{GatewayCounters, StreamDirection};
use crate::frame::{CLOSED_BY_READER, MAX_PIECE, PiecePart, PieceReader, READER_DIED, StreamPiece};

/// Carries a stream until both directions have ended.
pub(crate) async fn carry(stream: Stream, mut send: SendStream, mut receive: RecvStream, counters: &GatewayCounters) {
    let (read, write) = stream.into_halves();
    let outward = async {
        match read {
            Some(read) => carry_out(read, send, counters).await,
            // This host only reads; the other has nothing to wait for.
            None => drop(send.finish()),
        }
    };
    let inward = async {
        match write {
            Some(write) => carry_in(receive, write, counters).await,
            None => drop(receive.stop(CLOSED_BY_READER)),
        }
    };
    tokio::join!(outward, inward);
}

/// From the channel to the other host.
async fn carry_out(read: ReadHalf, mut send: SendStream, counters: &GatewayCounters) {
    let mut read = match AsyncReadHalf::new(read) {
        Ok(read) => read,
        Err(error) => {
            tracing::warn!(%error, "a stream is not carried");
            return end(&mut send, StreamPiece::Died).await;
        }
    };
    let mut stopped = std::pin::pin!(send.stopped());
    let mut buffer = vec![0; 4 + MAX_PIECE];
    loop {
        let got = tokio::select! {
            got = read.read(&mut buffer[4..]) => got,
            reader = &mut stopped => return leave(read, reader.ok().flatten() == Some(CLOSED_BY_READER)),
        };
        let length = match got {
            Ok(0) => return end(&mut send, StreamPiece::Ended).await,
            Ok(length) => length,
            Err(_) => return end(&mut send, StreamPiece::Died).await,
        };
        buffer[..4].copy_from_slice(&StreamPiece::Bytes(length).header());
        match send.write_all(&buffer[..4 + length]).await {
            Ok(()) => counters.carried(StreamDirection::Out, length),
            Err(error) => return leave(read, matches!(error, WriteError::Stopped(CLOSED_BY_READER))),
        }
    }
}

/// The other host reads no more.
fn leave(read: AsyncReadHalf, in_order: bool) {
    let mut read = read.into_inner();
    match in_order {
        true => read.close(),
        false => read.abort(),
    }
}

/// Sends the end of a stream, and waits until the other host has it: a stream that is dropped before is reset.
async fn end(send: &mut SendStream, how: StreamPiece) {
    if send.write_all(&how.header()).await.is_ok() && send.finish().is_ok() {
        let _ = send.stopped().await;
    }
}

/// From the other host to the channel.
async fn carry_in(mut receive: RecvStream, write: WriteHalf, counters: &GatewayCounters) {
    let mut write = match AsyncWriteHalf::new(write) {
        Ok(write) => write,
        Err(error) => {
            tracing::warn!(%error, "a stream is not carried");
            return drop(receive.stop(READER_DIED));
        }
    };
    let mut pieces = PieceReader::default();
    loop {
        let came = tokio::select! {
            // Small frames may have become one chunk of a whole window. If all of it were taken, the other host could send as much again meanwhile.
            came = receive.read_chunk(MAX_PIECE, true) => came,
            error = write.peer_gone() => return drop(receive.stop(code(&error))),
        };
        // Without an end it has died. The connection may have broken.
        let Ok(Some(chunk)) = came else { return write.into_inner().abort() };
        let mut came = &chunk.bytes[..];
        while let Some(part) = pieces.next(&mut came) {
            match part {
                PiecePart::Bytes(bytes) => {
                    if let Err(error) = write.write_all(bytes).await {
                        return drop(receive.stop(code(&error)));
                    }
                    counters.carried(StreamDirection::In, bytes.len());
                }
                PiecePart::Ended => return drop(write.shutdown().await),
                PiecePart::Died => return write.into_inner().abort(),
            }
        }
    }
}

/// How the reader of the channel has gone.
fn code(error: &std::io::Error) -> quinn::VarInt {
    if error.kind() == std::io::ErrorKind::BrokenPipe { CLOSED_BY_READER } else { READER_DIED }
}
