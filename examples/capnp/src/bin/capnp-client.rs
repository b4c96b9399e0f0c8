//! Sends its arguments to `web:capnp`, and prints the answer.

use partywall::Domain;
use partywall::asynchronous::AsyncStream;
use partywall_capnp::connect;
use partywall_capnp::echo_capnp::echo;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let stream = Domain::join("visitor")?.connect("web:capnp")?;
    let calls = async {
        let (object, system) = connect::<echo::Client>(AsyncStream::new(stream)?);
        tokio::task::spawn_local(system);
        let mut request = object.say_request();
        request.get().set_text(text);
        let answer = request.send().promise.await?;
        println!("{}", answer.get()?.get_text()?.to_str()?);
        Ok(())
    };
    tokio::task::LocalSet::new().run_until(calls).await
}
