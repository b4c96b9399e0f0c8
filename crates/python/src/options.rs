//! Options of a connection or a listener, as keyword arguments.

use partywall::{Options, RingSize};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

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
                let seconds = Duration::try_from_secs_f64(value.extract()?);
                options.spin = seconds.map_err(|e| pyo3::exceptions::PyValueError::new_err(format!("spin: {e}")))?;
            }
            "one_way" => options.one_way = value.extract()?,
            "huge_pages" => options.huge_pages = value.extract()?,
            "backlog" => options.backlog = value.extract()?,
            "max_peer_ring" => options.max_peer_ring = value.extract()?,
            other => {
                let text = format!(
                    "`{other}` is no option; there are ring, spin, one_way, huge_pages, backlog and max_peer_ring"
                );
                return Err(pyo3::exceptions::PyTypeError::new_err(text));
            }
        }
    }
    Ok(options)
}
