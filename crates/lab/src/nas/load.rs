//! Loads on an appliance.

use super::{Nas, NasFigure, fio, iozone, tpcc};
use crate::LabError;
use std::fmt;

/// One load, of which a run has several figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NasLoad {
    /// `fio`, with forms of what IOZone measures.
    Fio,
    /// IOZone, unmodified.
    Iozone,
    /// The transactions of TPC-C, scaled, on a database that lives on the appliance.
    Tpcc(tpcc::TpccOptions),
}

impl NasLoad {
    /// Fails with the program of the host that it lacks.
    pub fn check(self) -> Result<(), LabError> {
        match self {
            Self::Fio => fio::check(),
            Self::Iozone => iozone::program().map(drop),
            Self::Tpcc(_) => tpcc::check(),
        }
    }

    pub(super) fn run(self, nas: &Nas) -> Result<Vec<NasFigure>, LabError> {
        match self {
            Self::Fio => fio::run(nas),
            Self::Iozone => iozone::run(nas),
            Self::Tpcc(options) => tpcc::run(nas.client()?, options),
        }
    }
}

impl fmt::Display for NasLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fio => "fio",
            Self::Iozone => "IOZone",
            Self::Tpcc(_) => "TPC-C",
        })
    }
}
