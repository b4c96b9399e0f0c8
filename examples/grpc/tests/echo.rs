//! gRPC calls pass through streams: single calls, streams of calls, errors, a server that dies, and two processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall::Domain;
use partywall_daemon::Broker;
use partywall_grpc::generated::echo_client::EchoClient;
use partywall_grpc::generated::echo_server::EchoServer;
use partywall_grpc::{Echo, Words, channel, incoming};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::transport::Server;

fn words(text: &str) -> Words {
    Words { text: text.to_owned() }
}

/// Ends a test that hangs.
async fn within_guard(test: impl Future<Output = ()>) {
    tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs");
}

fn join(broker: &Broker, name: &str) -> Domain {
    Domain::builder().name(name).broker(broker.path()).join().unwrap()
}

#[tokio::test]
async fn calls_pass_and_know_their_caller() {
    within_guard(async {
        let broker = Broker::embedded().unwrap();
        let listener = join(&broker, "web").bind("grpc").unwrap();
        let server = Server::builder().add_service(EchoServer::new(Echo)).serve_with_incoming(incoming(listener));
        let server = tokio::spawn(server);
        let mut client = EchoClient::new(channel(join(&broker, "shop"), "web:grpc").await.unwrap());
        assert_eq!(client.say(words("hello")).await.unwrap().into_inner(), words("hello, shop"));

        let refused = client.say(words("")).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "no words"));

        // Many calls at once, of one connection.
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..200 {
            let mut client = client.clone();
            calls.spawn(async move { client.say(words(&number.to_string())).await.unwrap().into_inner().text });
        }
        let mut answers = calls.join_all().await;
        answers.sort_by_key(|answer| answer.split(',').next().unwrap().parse::<u32>().unwrap());
        assert_eq!(answers.len(), 200);
        assert_eq!(answers[199], "199, shop");
        server.abort();
    })
    .await;
}

#[tokio::test]
async fn stream_of_calls_passes_more_than_a_ring() {
    within_guard(async {
        let broker = Broker::embedded().unwrap();
        let listener = join(&broker, "web").bind("grpc").unwrap();
        let server = Server::builder().add_service(EchoServer::new(Echo)).serve_with_incoming(incoming(listener));
        let server = tokio::spawn(server);
        let mut client = EchoClient::new(channel(join(&broker, "shop"), "web:grpc").await.unwrap());
        let sent = tokio_stream::iter((0..300_u32).map(|number| words(&format!("{number:050000}"))));
        let mut answers = client.repeat(sent).await.unwrap().into_inner();
        let mut next = 0_u32;
        while let Some(answer) = answers.next().await {
            assert_eq!(answer.unwrap().text, format!("{next:050000}"));
            next += 1;
        }
        assert_eq!(next, 300);
        server.abort();
    })
    .await;
}

/// A program that is killed when the test is done with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(broker: &Broker) -> Running {
    let mut server = Command::new(env!("CARGO_BIN_EXE_grpc-server"));
    let server = server.env("PARTYWALL_BROKER", broker.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = Running(server);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "offering web:grpc\n");
    server
}

#[test]
fn two_processes_call_each_other() {
    let broker = Broker::embedded().unwrap();
    let _server = serve(&broker);
    let client = Command::new(env!("CARGO_BIN_EXE_grpc-client"))
        .arg("hello")
        .env("PARTYWALL_BROKER", broker.path())
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&client.stdout),
        "hello, visitor\n",
        "{}",
        String::from_utf8_lossy(&client.stderr)
    );
}

#[tokio::test]
async fn killed_server_fails_the_call_and_its_successor_serves() {
    within_guard(async {
        let broker = Broker::embedded().unwrap();
        let server = serve(&broker);
        let mut client = EchoClient::new(channel(join(&broker, "shop"), "web:grpc").await.unwrap());
        client.say(words("hello")).await.unwrap();
        drop(server);
        let failed = client.say(words("hello")).await.unwrap_err();
        assert!(matches!(failed.code(), Code::Unavailable | Code::Unknown | Code::Cancelled), "{failed:?}");
        let _server = serve(&broker);
        // tonic connects again; the call during which it notices may fail still.
        let start = std::time::Instant::now();
        loop {
            match client.say(words("again")).await {
                Ok(answer) => break assert_eq!(answer.into_inner(), words("again, shop")),
                Err(e) => assert!(start.elapsed().as_secs() < 60, "{e:?}"),
            }
        }
    })
    .await;
}
