//! fio's forms of what IOZone measures.

use super::{Cold, MOUNT, Nas, NasFigure, NasUnit};
use crate::{Guest, LabError};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// The program, and the package that it is in.
pub(super) const FIO: (&str, &str) = ("/usr/bin/fio", "fio");

/// One job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FioJob {
    /// A new file, written in order and made durable.
    Write,
    /// The same file once more.
    Rewrite,
    /// The file is read in order. No machine has it in its cache.
    Read,
    /// The file is read in order. The client does not have it in its cache.
    Reread,
    /// Four processes read and write parts of files of several sizes at random places.
    Mixed,
}

impl FioJob {
    /// All of them, in the order in which they are run: each finds the file of the one before.
    const ALL: [Self; 5] = [Self::Write, Self::Rewrite, Self::Read, Self::Reread, Self::Mixed];

    fn arguments(self) -> &'static str {
        match self {
            Self::Write => "--rw=write --bs=64k --size=24m --filename=file --end_fsync=1 --unlink=0 --create_on_open=1",
            Self::Rewrite => "--rw=write --bs=64k --size=24m --filename=file --end_fsync=1 --overwrite=1",
            Self::Read | Self::Reread => "--rw=read --bs=64k --size=24m --filename=file",
            Self::Mixed => {
                "--rw=randrw --bs=16k --numjobs=4 --nrfiles=4 --filesize=256k-2m --io_size=4m --size=4m --end_fsync=1 --group_reporting --randseed=7"
            }
        }
    }
}

impl fmt::Display for FioJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "write",
            Self::Rewrite => "re-write",
            Self::Read => "read",
            Self::Reread => "re-read",
            Self::Mixed => "mixed",
        })
    }
}

pub(super) fn check() -> Result<(), LabError> {
    let (path, package) = FIO;
    if Path::new(path).exists() {
        return Ok(());
    }
    Err(LabError::tool(path, format!("it is missing (Debian: {package})")))
}

/// Runs all jobs, and removes their files.
pub(super) fn run(nas: &Nas) -> Result<Vec<NasFigure>, LabError> {
    let mut figures = Vec::new();
    for job in FioJob::ALL {
        nas.cool(if job == FioJob::Read { Cold::Everywhere } else { Cold::Client })?;
        let value = rate(nas.client()?, job)? / 1e6;
        figures.push(NasFigure { name: format!("fio {job}"), unit: NasUnit::MegabytesPerSecond, value });
    }
    nas.client()?.shell(&format!("rm -f {MOUNT}/file {MOUNT}/load*"))?;
    Ok(figures)
}

/// Bytes a second, of reads and writes together.
fn rate(client: &Guest, job: FioJob) -> Result<f64, LabError> {
    let line = format!(
        "fio --name=load --directory={MOUNT} --ioengine=psync --thread --output-format=json --output=/tmp/fio.json {} > /tmp/fio.log 2>&1 || {{ cat /tmp/fio.log; exit 1; }}",
        job.arguments()
    );
    client.shell(&line)?;
    let said = client.get("/tmp/fio.json")?;
    let failed = |why: String| LabError::tool("fio", why);
    let report: Value = serde_json::from_slice(&said).map_err(|e| failed(e.to_string()))?;
    let done = &report["jobs"][0];
    let (mut bytes, mut longest) = (0, 0);
    for part in ["read", "write"] {
        bytes += done[part]["io_bytes"].as_u64().unwrap_or(0);
        longest = longest.max(done[part]["runtime"].as_u64().unwrap_or(0));
    }
    if done["error"] != 0 || bytes == 0 || longest == 0 {
        return Err(failed(format!("no result: {done}")));
    }
    Ok(bytes as f64 * 1000.0 / longest as f64)
}
