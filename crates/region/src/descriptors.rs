//! How many descriptors a process may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on the descriptors of this process to the hard one. Where it fails, the old limit stays.
///
/// # Errors
/// The kernel's.
pub fn raise_limit() -> rustix::io::Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
}
