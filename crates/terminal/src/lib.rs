//! How the programs of Partywall write to a terminal: plain tables, harmless text, numbers that they read, and what a demo
//! shows while it runs.

mod flood;
mod number;
mod program;
mod show;
mod table;
mod text;

pub use number::{bytes, size, whole};
pub use program::{end, log_of_service_to_stderr, log_to_stderr};
pub use show::{Show, typed};
pub use table::{Table, table};
pub use text::{printable, printable_json, printable_lines};
