//! Results as a file: everything that was measured, run by run, and on what.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    affinity::Placement,
    error::{BenchError, During, Result},
    report::{cell::Cell, host::Host, verdict::Verdict},
};

/// The version of this format. A reader refuses others.
pub(crate) const SCHEMA: u32 = 1;

/// A whole result file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct BenchReport {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// Version of the bench.
    pub(crate) version: String,
    /// The command line, without the path of the program.
    pub(crate) command: Vec<String>,
    /// When it began, UTC.
    pub(crate) date: String,
    /// The machine that was measured on.
    pub(crate) host: Host,
    /// On which processors.
    pub(crate) placement: Placement,
    /// The measured cells.
    pub(crate) cells: Vec<Cell>,
    /// The claims that were checked, with their outcomes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) verdicts: Vec<Verdict>,
}

/// The version of a report, which is read before the rest is parsed.
#[derive(Deserialize)]
struct Head {
    schema: u32,
}

impl BenchReport {
    /// A report of `cells`, measured here and now.
    pub(crate) fn new(host: Host, placement: Placement, cells: Vec<Cell>, verdicts: Vec<Verdict>) -> Self {
        let version = env!("CARGO_PKG_VERSION").into();
        let command = std::env::args().skip(1).collect();
        let date = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
        Self { schema: SCHEMA, version, command, date, host, placement, cells, verdicts }
    }

    /// Writes it, as a whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let doing = || format!("writing {}", path.display());
        let mut text = serde_json::to_string_pretty(self).map_err(|e| BenchError::transport(&doing(), e))?;
        text.push('\n');
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder).during(doing())?;
        let mut file = tempfile::NamedTempFile::new_in(folder).during(doing())?;
        std::io::Write::write_all(&mut file, text.as_bytes()).during(doing())?;
        let readable = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o644);
        file.as_file().set_permissions(readable).during(doing())?;
        file.persist(path).map_err(|e| e.error).during(doing())?;
        Ok(())
    }

    /// Reads one back.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).during(format!("reading {}", path.display()))?;
        Self::parse(&text).map_err(|reason| BenchError::Usage(format!("{}: {reason}", path.display())))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let head: Head =
            serde_json::from_str(text).map_err(|e| format!("this is not a result file of partywall-bench ({e})"))?;
        if head.schema != SCHEMA {
            return Err(format!("its format is version {}, and this program reads version {SCHEMA}", head.schema));
        }
        serde_json::from_str(text).map_err(|e| format!("the file is damaged: {e}"))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        mechanism::Mechanism,
        report::{cell::Key, metric::Metric},
        task::Figures,
    };

    /// A report whose single cell ran at the given rates.
    pub(crate) fn sample(rates: &[f64]) -> BenchReport {
        let mut cell = Cell::new(Key::new("stream", Mechanism::Unix).with("message", 64).with("waiting", "adaptive"));
        cell.runs = rates.iter().map(|rate| Figures::from([(Metric::BytesPerSecond, *rate)])).collect();
        BenchReport::new(Host::look(), Placement { active: 0, passive: 1 }, vec![cell], Vec::new())
    }

    #[test]
    fn comes_back_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/result.json");
        let report = sample(&[1.5e9, 2.5e9]);
        report.write(&path).unwrap();
        assert_eq!(BenchReport::read(&path).unwrap(), report);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn unreadable_report_is_rejected_with_reason() {
        let text = serde_json::to_string(&sample(&[1.0])).unwrap();
        assert!(BenchReport::parse(&text.replace("\"schema\":1", "\"schema\":2")).unwrap_err().contains("version 2"));
        assert!(BenchReport::parse("{}").unwrap_err().contains("not a result file"));
        assert!(BenchReport::parse(&text[..text.len() / 2]).is_err());
        assert!(BenchReport::parse("{\"schema\":1}").unwrap_err().contains("damaged"));
    }
}
