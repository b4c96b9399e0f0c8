//! File systems under the workloads of mail, web and file servers.

pub(crate) mod mounts;
pub(crate) mod set;
pub(crate) mod workload;
