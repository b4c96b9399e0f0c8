//! IOZone, as Debian's package has it.

use super::{Cold, MOUNT, Nas, NasFigure, NasUnit};
use crate::{Cache, LabError};
use std::path::PathBuf;
use std::time::Duration;

/// The longest that one of its runs takes.
const LIMIT: Duration = Duration::from_secs(240);
/// Files of 1 and 16 MiB, in records of 4 and 64 KiB.
const SIZES: &str = "-s 1m -s 16m -r 4k -r 64k";
/// The numbers of processes, and the size of each one's file.
const PROCESSES: [(usize, &str); 2] = [(1, "16m"), (4, "4m")];

/// Its file on the host: an installed one, or that of `scripts/setup.sh nas`.
pub(super) fn program() -> Result<PathBuf, LabError> {
    let fetched = Cache::open()?.path("tools", "iozone")?;
    let found = [PathBuf::from("/usr/bin/iozone"), fetched].into_iter().find(|path| path.exists());
    found.ok_or_else(|| LabError::tool("iozone", "it is missing (Debian's section non-free: iozone3)"))
}

/// Writes, reads and mixes.
pub(super) fn run(nas: &Nas) -> Result<Vec<NasFigure>, LabError> {
    let client = nas.client()?;
    let iozone = |arguments: &str| {
        let line = format!(
            "iozone {arguments} > /tmp/iozone.log 2>&1 || {{ cat /tmp/iozone.log; exit 1; }}; cat /tmp/iozone.log"
        );
        client.shell_within(&line, LIMIT)
    };
    // It mounts the file system again before each test, so the client has nothing in its cache.
    let mut figures = tests(&iozone(&format!("-i 0 -i 1 -e -c -U {MOUNT} -f {MOUNT}/iozone {SIZES}"))?)?;
    for (processes, size) in PROCESSES {
        let files: String = (0..processes).map(|number| format!(" {MOUNT}/iozone.{number}")).collect();
        // With processes it cannot mount again, so each test is a separate run.
        for (test, wanted, cold) in [
            ("-i 0 -e -c", &[("initial writers", "write"), ("rewriters", "re-write")][..], Cold::Client),
            // What it reads again comes from the client's own cache, so that is no figure.
            ("-i 1", &[("readers", "read")], Cold::Everywhere),
            ("-i 8 -e -c", &[("mixed workload", "mixed")], Cold::Client),
        ] {
            nas.cool(cold)?;
            let said = iozone(&format!("{test} -w -x -t {processes} -s {size} -r 16k -F{files}"))?;
            for (words, name) in wanted {
                let value = throughput(&said, words)?;
                let name = format!("IOZone {name}, {size} in 16k, x{processes}");
                figures.push(NasFigure { name, unit: NasUnit::MegabytesPerSecond, value });
            }
        }
        client.shell(&format!("rm -f{files}"))?;
    }
    Ok(figures)
}

/// The table of tests with one process: KiB of the file and of a record, then the rates.
fn tests(said: &str) -> Result<Vec<NasFigure>, LabError> {
    let mut figures = Vec::new();
    for line in said.lines() {
        let numbers: Option<Vec<u32>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
        let Some(&[size, record, ref rates @ ..]) = numbers.as_deref() else { continue };
        for (name, rate) in ["write", "re-write", "read", "re-read"].into_iter().zip(rates) {
            let name = format!("IOZone {name}, {}m in {record}k", size / 1024);
            figures.push(NasFigure { name, unit: NasUnit::MegabytesPerSecond, value: megabytes(f64::from(*rate)) });
        }
    }
    if figures.is_empty() { Err(LabError::tool("iozone", format!("it printed no rates: {said}"))) } else { Ok(figures) }
}

/// The rate of all processes together.
fn throughput(said: &str, words: &str) -> Result<f64, LabError> {
    let sees = |line: &str| -> Option<f64> {
        let (test, rate) = line.trim().strip_prefix("Children see throughput for")?.split_once('=')?;
        let test = test.trim().trim_start_matches(|c: char| c.is_ascii_digit()).trim_start();
        if test == words { rate.trim().strip_suffix("kB/sec")?.trim().parse().ok() } else { None }
    };
    let rate = said.lines().find_map(sees);
    rate.map(megabytes).ok_or_else(|| LabError::tool("iozone", format!("it printed no rate of {words}: {said}")))
}

/// Its kB are of 1,024 bytes.
fn megabytes(kibibytes: f64) -> f64 {
    kibibytes * 1024.0 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_one_process_becomes_a_figure_for_each_test() {
        let said = "\tOutput is in kBytes/sec\n      kB  reclen    write  rewrite    read    reread\n    1024       4    69736    85368    28495    49766     \n   16384      64     1000     2000     3000     4000\n\niozone test complete.\n";
        let figures = super::tests(said).unwrap();
        let all: Vec<(&str, f64)> = figures.iter().map(|figure| (figure.name.as_str(), figure.value)).collect();
        assert_eq!(all.len(), 8);
        assert_eq!(all[0], ("IOZone write, 1m in 4k", 71.409664));
        assert_eq!(all[7], ("IOZone re-read, 16m in 64k", 4.096));
        assert!(super::tests("iozone test complete.").is_err());
    }

    #[test]
    fn throughput_is_that_of_the_test_asked_for() {
        let said = "\tChildren see throughput for  4 initial writers \t=  431143.47 kB/sec\n\tParent sees throughput for  4 initial writers \t=  219312.19 kB/sec\n\tChildren see throughput for  4 re-readers \t\t=  5.00 kB/sec\n\tChildren see throughput for 4 readers \t\t=  1000.00 kB/sec\n";
        assert_eq!(throughput(said, "initial writers").unwrap(), 431_143.47 * 1024.0 / 1e6);
        assert_eq!(throughput(said, "readers").unwrap(), 1.024);
        assert!(throughput(said, "mixed workload").is_err());
    }
}
