//! Cap'n Proto's calls pass through streams: calls, objects, pipelines, errors, a server that dies, and two processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall::asynchronous::AsyncStream;
use partywall_capnp::connect;
use partywall_capnp::echo_capnp::echo;
use partywall_daemon::Broker;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::task::LocalSet;

/// A program that is killed when the test is done with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(broker: &Broker) -> Running {
    let mut server = Command::new(env!("CARGO_BIN_EXE_capnp-server"));
    let server = server.env("PARTYWALL_BROKER", broker.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = Running(server);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "offering web:capnp\n");
    server
}

/// Ends a test that hangs.
async fn within_guard(test: impl Future<Output = ()>) {
    tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs");
}

/// The server's object, within a `LocalSet`.
fn object(broker: &Broker) -> echo::Client {
    let shop = partywall::Domain::builder().name("shop").broker(broker.path()).join().unwrap();
    let stream = shop.connect("web:capnp").unwrap();
    let (object, system) = connect(AsyncStream::new(stream).unwrap());
    tokio::task::spawn_local(system);
    object
}

async fn say(object: &echo::Client, text: &str) -> Result<String, capnp::Error> {
    let mut request = object.say_request();
    request.get().set_text(text);
    Ok(request.send().promise.await?.get()?.get_text()?.to_string()?)
}

#[tokio::test]
async fn calls_and_errors_pass_and_know_their_caller() {
    let broker = Broker::embedded().unwrap();
    let _server = serve(&broker);
    let calls = async {
        let object = object(&broker);
        assert_eq!(say(&object, "hello").await.unwrap(), "hello, shop");
        // More than the ring holds, both ways.
        let long = "x".repeat(20 << 20);
        assert_eq!(say(&object, &long).await.unwrap().len(), long.len() + ", shop".len());
        let refused = say(&object, "").await.unwrap_err();
        assert!(refused.to_string().contains("no words"), "{refused}");
        assert_eq!(say(&object, "still here").await.unwrap(), "still here, shop");
    };
    within_guard(LocalSet::new().run_until(calls)).await;
}

#[tokio::test]
async fn pipelined_calls_on_objects_keep_their_order() {
    let broker = Broker::embedded().unwrap();
    let _server = serve(&broker);
    let calls = async {
        let object = object(&broker);
        // The counter is called before the server has answered which one it is.
        let counter = object.counter_request().send().pipeline.get_counter();
        let answers: Vec<_> = (0..100).map(|_| counter.next_request().send().promise).collect();
        for (number, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer.await.unwrap().get().unwrap().get_value(), number as u64 + 1);
        }
    };
    within_guard(LocalSet::new().run_until(calls)).await;
}

#[tokio::test]
async fn killed_server_fails_the_calls() {
    let broker = Broker::embedded().unwrap();
    let server = serve(&broker);
    let calls = async {
        let object = object(&broker);
        say(&object, "hello").await.unwrap();
        drop(server);
        say(&object, "hello").await.unwrap_err();
        let _server = serve(&broker);
        assert_eq!(say(&self::object(&broker), "again").await.unwrap(), "again, shop");
    };
    within_guard(LocalSet::new().run_until(calls)).await;
}

#[test]
fn two_processes_call_each_other() {
    let broker = Broker::embedded().unwrap();
    let _server = serve(&broker);
    let client =
        Command::new(env!("CARGO_BIN_EXE_capnp-client")).arg("hello").env("PARTYWALL_BROKER", broker.path()).output();
    let client = client.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&client.stdout),
        "hello, visitor\n",
        "{}",
        String::from_utf8_lossy(&client.stderr)
    );
}
