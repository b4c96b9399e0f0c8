//! What the programs of Partywall share in speaking to people: plain tables, and what a demo tells while it runs.

mod show;
mod table;

pub use show::{Show, typed};
pub use table::table;
