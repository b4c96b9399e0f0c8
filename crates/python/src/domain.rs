//! Joining a domain.

use crate::calling::PyCallClient;
use crate::listener::{PyListener, PyMessageListener};
use crate::message::PyMessageSocket;
use crate::outcome::{WaitsFor, forked, raised};
use crate::serving::{self, PyCallServer};
use crate::slot::Slot;
use crate::stream::PyStream;
use crate::{child, options};
use partywall::rpc::{CallClient, CallServer};
use partywall::{Domain, Error, MessageListener, MessageSocket};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// Membership of a domain.
#[pyclass(name = "Domain", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyDomain {
    domain: Slot<Domain>,
    name: String,
}

impl PyDomain {
    /// Has the broker do something, without the interpreter's lock.
    fn ask<T: Send>(&self, py: Python<'_>, ask: impl FnOnce(&Domain) -> Result<T, Error> + Send) -> PyResult<T> {
        let domain = self.domain.with(py, |domain| domain.clone())?;
        py.detach(|| ask(&domain)).map_err(|e| raised(py, &e, WaitsFor::Data))
    }
}

#[pymethods]
impl PyDomain {
    /// Joins a domain.
    #[new]
    #[pyo3(signature = (name=None, *, broker=None))]
    fn new(py: Python<'_>, name: Option<String>, broker: Option<PathBuf>) -> PyResult<Self> {
        if child::is_child() {
            return Err(forked(py));
        }
        child::begin_use();
        let mut builder = Domain::builder();
        if let Some(name) = name {
            builder = builder.name(name);
        }
        if let Some(broker) = broker {
            builder = builder.broker(broker);
        }
        let domain = py.detach(|| builder.join()).map_err(|e| raised(py, &e, WaitsFor::Data))?;
        let name = domain.name().to_owned();
        Ok(Self { domain: Slot::new(Some(domain)), name })
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Offers a service for streams.
    #[pyo3(signature = (service, **choices))]
    fn listen(&self, py: Python<'_>, service: &str, choices: Option<&Bound<'_, PyDict>>) -> PyResult<PyListener> {
        let options = options::chosen(choices)?;
        self.ask(py, |domain| domain.bind_with(service, &options)).map(PyListener::new)
    }

    /// Connects a stream to `DOMAIN:SERVICE`.
    #[pyo3(signature = (target, **choices))]
    fn connect(&self, py: Python<'_>, target: &str, choices: Option<&Bound<'_, PyDict>>) -> PyResult<PyStream> {
        let options = options::chosen(choices)?;
        self.ask(py, |domain| domain.connect_with(target, &options)).map(|stream| PyStream::new(stream, None))
    }

    /// Offers a service for messages.
    #[pyo3(signature = (service, **choices))]
    fn listen_messages(
        &self,
        py: Python<'_>,
        service: &str,
        choices: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyMessageListener> {
        let options = options::chosen(choices)?;
        self.ask(py, |domain| MessageListener::bind(domain, service, &options)).map(PyMessageListener::new)
    }

    /// Connects a message socket to `DOMAIN:SERVICE`.
    #[pyo3(signature = (target, **choices))]
    fn connect_messages(
        &self,
        py: Python<'_>,
        target: &str,
        choices: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyMessageSocket> {
        let options = options::chosen(choices)?;
        self.ask(py, |domain| MessageSocket::connect_with(domain, target, &options))
            .map(|socket| PyMessageSocket::new(socket, None))
    }

    /// Offers functions as a service of calls: a dictionary of functions by their names or numbers.
    #[pyo3(signature = (service, methods, **choices))]
    fn serve_calls(
        &self,
        py: Python<'_>,
        service: &str,
        methods: &Bound<'_, PyDict>,
        choices: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyCallServer> {
        let choices = options::chosen_for_calls(choices)?;
        let mut builder = serving::with_functions(CallServer::builder(), methods)?;
        builder = builder.options(choices.options).heap(choices.heap).same_address(choices.same_address);
        if let Some(bytes) = choices.max_peer_heap {
            builder = builder.max_peer_heap(bytes);
        }
        self.ask(py, |domain| builder.bind(domain, service)).map(PyCallServer::new)
    }

    /// Connects to `DOMAIN:SERVICE`, a service of calls. The server may call the functions of a dictionary back.
    #[pyo3(signature = (target, methods=None, **choices))]
    fn connect_calls(
        &self,
        py: Python<'_>,
        target: &str,
        methods: Option<&Bound<'_, PyDict>>,
        choices: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyCallClient> {
        let choices = options::chosen_for_calls(choices)?;
        let mut builder = CallClient::builder();
        if let Some(methods) = methods {
            builder = serving::with_functions_of_client(builder, methods)?;
        }
        builder = builder.options(choices.options).heap(choices.heap).same_address(choices.same_address);
        if let Some(bytes) = choices.max_peer_heap {
            builder = builder.max_peer_heap(bytes);
        }
        self.ask(py, |domain| builder.connect(domain, target)).map(PyCallClient::new)
    }

    /// Leaves the domain. Its listeners and connections go on.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.domain.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<partywall.Domain {}>", self.name)
    }
}
