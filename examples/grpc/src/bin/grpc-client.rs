//! Sends its arguments to `web:grpc`, and prints the answer.

use partywall::Domain;
use partywall_grpc::generated::echo_client::EchoClient;
use partywall_grpc::{Words, channel};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let mut client = EchoClient::new(channel(Domain::join("visitor")?, "web:grpc").await?);
    let answer = client.say(Words { text }).await?.into_inner();
    println!("{}", answer.text);
    Ok(())
}
