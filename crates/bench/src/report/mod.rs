//! The presentation of figures: statistics, tables, files and plots.

pub(crate) mod cell;
pub(crate) mod compare;
pub(crate) mod host;
pub(crate) mod html;
pub(crate) mod json;
pub(crate) mod metric;
pub(crate) mod plot;
pub(crate) mod stats;
pub(crate) mod table;
pub(crate) mod unit;
pub(crate) mod verdict;
