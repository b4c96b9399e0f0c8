//! Makes the client and the server of the service. A project with a `.proto` file has `tonic_prost_build::compile_protos` here instead, which
//! needs `protoc`.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let method = |name: &str, route: &str| {
        let method = Method::builder().name(name).route_name(route);
        method.input_type("crate::Words").output_type("crate::Words").codec_path("tonic_prost::ProstCodec")
    };
    let echo = Service::builder()
        .package("partywall.example")
        .name("Echo")
        .method(method("say", "Say").build())
        .method(method("repeat", "Repeat").client_streaming().server_streaming().build())
        .build();
    Builder::new().compile(&[echo]);
}
