//! Joining a domain.
#![expect(unsafe_code, reason = "takes pointers from C and gives handles to it")]

use crate::argument;
use crate::failure::CallFailure;
use crate::fork;
use partywall::Domain;
use std::ffi::{CString, c_char, c_int};

/// `pw_domain` of the header.
#[derive(Debug)]
pub struct DomainHandle {
    pub(crate) domain: Domain,
    name: CString,
}

exported! {
    /// Joins a domain.
    pub fn pw_join(name: *const c_char, broker: *const c_char, domain: *mut *mut DomainHandle) -> c_int {
        fork::begin_use();
        // SAFETY: C passes texts or null.
        let (name, broker) = unsafe { (argument::optional_text(name, "name")?, argument::optional_text(broker, "broker")?) };
        let join = || {
            let mut builder = Domain::builder();
            if let Some(name) = name {
                builder = builder.name(name);
            }
            if let Some(broker) = broker {
                builder = builder.broker(broker);
            }
            let domain = builder.join()?;
            let name = CString::new(domain.name()).map_err(|_| CallFailure::invalid("the broker gave a name with a zero in it"))?;
            Ok(Box::into_raw(Box::new(DomainHandle { domain, name })))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(domain, "domain", join) }?;
        Ok(0)
    }

    /// The name of a domain.
    pub fn pw_domain_name(domain: *const DomainHandle) -> *const c_char {
        // SAFETY: C passes a handle that it has not closed.
        let domain = unsafe { argument::shared(domain, "domain") }?;
        Ok(domain.name.as_ptr())
    }

    /// Leaves a domain.
    pub fn pw_leave(domain: *mut DomainHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(domain) });
        Ok(())
    }
}
