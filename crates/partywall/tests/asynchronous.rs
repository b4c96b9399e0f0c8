//! The stream tests under tokio.
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::asynchronous::{AsyncReadHalf, AsyncStream, AsyncWriteHalf};
use partywall::{Error, Options};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn async_pair(options: &Options) -> (AsyncStream, AsyncStream) {
    let (a, b) = pair(options);
    (AsyncStream::new(a).unwrap(), AsyncStream::new(b).unwrap())
}

#[tokio::test]
async fn async_echo_works_with_half_close() {
    let _guard = hang_guard();
    let (mut a, b) = async_pair(&fixed(4096));
    let echo = tokio::spawn(async move {
        let (mut reader, mut writer) = b.into_halves();
        let copied = tokio::io::copy(&mut reader, &mut writer).await.unwrap();
        writer.shutdown().await.unwrap();
        copied
    });
    let (mut dice, mut answer) = (Dice::new(1), Vec::new());
    let mut total = 0;
    for at in 0..500 {
        let message = Pattern.bytes(at, dice.size(11));
        a.write_all(&message).await.unwrap();
        answer.resize(message.len(), 0);
        a.read_exact(&mut answer).await.unwrap();
        assert!(answer == message);
        total += message.len() as u64;
    }
    a.shutdown().await.unwrap();
    assert_eq!(a.read(&mut answer).await.unwrap(), 0);
    assert_eq!(echo.await.unwrap(), total);
    assert_fails!(a.write(b"more").await, Error::Closed(_));
}

#[tokio::test]
async fn async_streams_exceed_ring_size_in_both_directions() {
    let _guard = hang_guard();
    let (a, b) = async_pair(&fixed(4096));
    let (ar, aw) = a.into_halves();
    let (br, bw) = b.into_halves();
    let send = |mut writer: AsyncWriteHalf| {
        tokio::spawn(async move {
            writer.write_all(&Pattern.bytes(0, 1 << 20)).await.unwrap();
            writer.flush().await.unwrap();
            writer.shutdown().await.unwrap();
        })
    };
    let receive = |mut reader: AsyncReadHalf| {
        tokio::spawn(async move {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).await.unwrap();
            assert_eq!(all.len(), 1 << 20);
            Pattern.check(0, &all);
        })
    };
    for task in [send(aw), send(bw), receive(ar), receive(br)] {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn hundred_async_connections_echo_in_one_thread() {
    let _guard = hang_guard();
    let world = World::new();
    let mut tasks = Vec::new();
    for i in 0..100 {
        let (there, here) = world.connection(&fixed(4096));
        tasks.push(tokio::spawn(async move {
            let mut stream = AsyncStream::new(there).unwrap();
            for round in 0..20 {
                stream.write_all(&Pattern.bytes(i + round, 300)).await.unwrap();
                let mut answer = [0; 300];
                stream.read_exact(&mut answer).await.unwrap();
                Pattern.check(i + round, &answer);
            }
        }));
        tasks.push(tokio::spawn(async move {
            let (mut reader, mut writer) = AsyncStream::new(here).unwrap().into_halves();
            tokio::io::copy(&mut reader, &mut writer).await.unwrap();
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    world.assert_no_channel_is_left();
}

#[tokio::test]
async fn pending_async_read_can_be_cancelled_without_loss() {
    let _guard = hang_guard();
    let (mut a, mut b) = async_pair(&fixed(4096));
    let mut buf = [0; 8];
    let waited = tokio::time::timeout(Duration::from_millis(30), b.read(&mut buf)).await;
    assert!(waited.is_err(), "nothing to read");
    a.write_all(b"later").await.unwrap();
    assert_eq!(b.read(&mut buf).await.unwrap(), 5, "nothing was lost by giving up");
    drop(a);
    assert_eq!(b.read(&mut buf).await.unwrap(), 0);
    assert_fails!(b.write(&buf).await, Error::Closed(_));
}

#[tokio::test]
async fn halves_come_back_and_one_way_streams_are_refused() {
    let (a, mut b) = pair(&fixed(4096).one_way(true));
    assert!(AsyncStream::new(a).is_err());
    b.set_nonblocking(true);
    let (c, mut d) = pair(&fixed(4096));
    let (reader, writer) = c.into_halves();
    let reader = AsyncReadHalf::new(reader.unwrap()).unwrap();
    let writer = AsyncWriteHalf::new(writer.unwrap()).unwrap();
    let (mut reader, mut writer) = (reader.into_inner(), writer.into_inner());
    use std::io::{Read, Write};
    writer.write_all(b"sync").unwrap();
    d.read_exact(&mut [0; 4]).unwrap();
    reader.set_nonblocking(false);
    d.write_all(b"back").unwrap();
    reader.read_exact(&mut [0; 4]).unwrap();
}
