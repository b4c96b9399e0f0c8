//! Serves `Echo` as `web:grpc`, until it is killed.
//!
//! ```console
//! $ partywalld &
//! $ cargo run --manifest-path examples/grpc/Cargo.toml --bin grpc-server
//! $ cargo run --manifest-path examples/grpc/Cargo.toml --bin grpc-client hello
//! ```

use partywall::Domain;
use partywall_grpc::generated::echo_server::EchoServer;
use partywall_grpc::{Echo, incoming};
use tonic::transport::Server;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = Domain::join("web")?;
    let listener = domain.bind("grpc")?;
    println!("offering web:grpc");
    Server::builder().add_service(EchoServer::new(Echo)).serve_with_incoming(incoming(listener)).await?;
    Ok(())
}
