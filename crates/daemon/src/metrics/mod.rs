//! Metrics over HTTP, for Prometheus and its like (OpenMetrics 1.0).
//!
//! ```text
//!   scraper --- GET /metrics ---> Exporter, a thread ----- report? ----> event loop
//!           <-- text ------------ (encodes, keeps it 1 s)  <-- Report ---
//! ```
//!
//! The event loop never waits for a scraper. It makes one report a second at most, when asked. Everything that a scraper can do (send
//! nothing, send garbage, read nothing, come in hundreds) is the exporter's affair, whose connections are bounded in number, size
//! and time.

mod address;
mod connection;
mod exporter;
mod text;

pub(crate) use exporter::Exporter;
