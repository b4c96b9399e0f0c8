//! Options of a connection or a listener, as keyword arguments.

use crate::slot;
use partywall::rpc::HeapOptions;
use partywall::{Options, RingSize};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `ring=`: one size for a ring that keeps it, or the first and the largest size.
#[derive(FromPyObject)]
enum RingArgument {
    Fixed(u64),
    Adaptive(u64, u64),
}

/// The options that the keywords choose.
pub(crate) fn chosen(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Options> {
    let mut options = Options::default();
    for (key, value) in keywords.into_iter().flatten() {
        match key.extract::<String>()?.as_str() {
            "ring" => {
                options.ring = match value.extract()? {
                    RingArgument::Fixed(size) => RingSize::Fixed(size),
                    RingArgument::Adaptive(initial, max) => RingSize::Adaptive { initial, max },
                }
            }
            "spin" => {
                let spin = slot::duration("spin", value.extract()?);
                options.spin = spin.map_err(pyo3::exceptions::PyValueError::new_err)?;
            }
            "one_way" => options.one_way = value.extract()?,
            "huge_pages" => options.huge_pages = value.extract()?,
            "backlog" => options.backlog = value.extract()?,
            "max_peer_ring" => options.max_peer_ring = value.extract()?,
            "sleeps_often" => options.sleeps_often = value.extract()?,
            other => {
                let text = format!(
                    "`{other}` is no option; there are ring, spin, one_way, huge_pages, backlog, max_peer_ring and sleeps_often"
                );
                return Err(pyo3::exceptions::PyTypeError::new_err(text));
            }
        }
    }
    Ok(options)
}

/// `heap=`: bytes of the first segment of a heap, or those and the most bytes of all segments.
#[derive(FromPyObject)]
enum HeapArgument {
    First(u64),
    FirstAndMax(u64, u64),
}

/// The options of a connection of calls, or of a service of calls.
#[derive(Debug, Default)]
pub(crate) struct CallChoices {
    pub(crate) options: Options,
    pub(crate) heap: HeapOptions,
    pub(crate) max_peer_heap: Option<u64>,
    pub(crate) same_address: bool,
}

/// Like [`chosen`], with the keywords of calls as well.
pub(crate) fn chosen_for_calls(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<CallChoices> {
    let mut choices = CallChoices::default();
    let Some(keywords) = keywords else { return Ok(choices) };
    let others = keywords.copy()?;
    for (key, value) in keywords {
        match key.extract::<String>()?.as_str() {
            "heap" => {
                choices.heap = match value.extract()? {
                    HeapArgument::First(first) => choices.heap.first(first),
                    HeapArgument::FirstAndMax(first, max) => choices.heap.first(first).max(max),
                }
            }
            "max_peer_heap" => choices.max_peer_heap = Some(value.extract()?),
            "same_address" => choices.same_address = value.extract()?,
            _ => continue,
        }
        others.del_item(key)?;
    }
    choices.options = chosen(Some(&others))?;
    choices.heap.huge_pages = choices.options.huge_pages;
    Ok(choices)
}
