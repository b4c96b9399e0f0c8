//! The other side of a connection.

use partywall::PeerInfo;
use pyo3::prelude::*;

/// The other side of a connection, as the broker vouches for it.
#[pyclass(name = "Peer", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyPeer {
    pub(crate) info: PeerInfo,
}

impl PyPeer {
    pub(crate) fn from_info(info: Option<&PeerInfo>) -> Option<Self> {
        info.map(|info| Self { info: info.clone() })
    }
}

#[pymethods]
impl PyPeer {
    /// The name of its domain.
    #[getter]
    fn domain(&self) -> &str {
        &self.info.name
    }

    /// The service.
    #[getter]
    fn service(&self) -> &str {
        &self.info.service
    }

    /// Its domain's epoch.
    #[getter]
    fn epoch(&self) -> u64 {
        self.info.epoch
    }

    /// Its user on the host; `None` on the connecting side, and for a peer in a virtual machine.
    #[getter]
    fn uid(&self) -> Option<u32> {
        self.info.uid()
    }

    /// Whether its user is known without doubt: `False` for a process in a container, where a uid may be that of another user.
    #[getter]
    fn at_home(&self) -> bool {
        self.info.at_home
    }

    /// Its process; `None` on the connecting side.
    #[getter]
    fn pid(&self) -> Option<u32> {
        self.info.pid
    }

    fn __repr__(&self) -> String {
        format!("<partywall.Peer {}:{}>", self.info.name, self.info.service)
    }
}
