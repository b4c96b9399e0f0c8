//! The settings in the files of a systemd unit, as far as they concern the library.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::system_root::SystemRoot;
use crate::exit::{CommandFailure, Context};

/// Where systemd looks for units; the first that has one wins.
const FOLDERS: [&str; 8] = [
    "etc/systemd/system",
    "run/systemd/system",
    "run/systemd/generator.early",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
    "run/systemd/generator",
    "run/systemd/generator.late",
];

/// The settings of a unit's section `[Service]` with those of its drop-ins, in the order in which systemd reads them.
#[derive(Debug, Default)]
pub(super) struct ServiceUnit {
    settings: Vec<(String, String)>,
}

/// Reads the name of a service; `nginx` means `nginx.service`.
pub(super) fn parse_name(text: &str) -> Result<String, String> {
    let name = if text.contains('.') { text.to_owned() } else { format!("{text}.service") };
    let stem = name.strip_suffix(".service").ok_or("only services run programs: write a name that ends in .service")?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    match !stem.is_empty() && stem.len() < 200 && !stem.starts_with('.') && stem.chars().all(allowed) {
        true => Ok(name),
        false => Err("that is no name of a unit: letters, digits and :-_.\\@".to_owned()),
    }
}

impl ServiceUnit {
    /// Reads the files of a service; `None` if there is no such service below `root`.
    pub(super) fn find(root: &SystemRoot, name: &str) -> Result<Option<Self>, CommandFailure> {
        // A unit such as app@blue.service may come from app@.service.
        let template = name.split_once('@').map(|(before, _)| format!("{before}@.service"));
        let names: Vec<&str> = [name].into_iter().chain(template.as_deref()).collect();
        let mut candidates = names.iter().flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(name)));
        let Some(file) = candidates.find(|path| root.has(path)) else { return Ok(None) };
        let mut unit = Self::default();
        unit.read(root, &file)?;
        let mut drop_ins: Vec<PathBuf> = Vec::new();
        for folder in names.iter().flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(format!("{name}.d")))) {
            let names = root.names(&folder);
            drop_ins.extend(names.iter().map(|name| folder.join(OsStr::from_bytes(name.to_bytes()))));
        }
        drop_ins.retain(|path| path.extension().is_some_and(|extension| extension == "conf"));
        // Ours is written again, so what it says does not count.
        drop_ins.retain(|path| path.file_name().is_none_or(|file| file != super::drop_in::FILE));
        drop_ins.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
        for drop_in in drop_ins {
            unit.read(root, &drop_in)?;
        }
        Ok(Some(unit))
    }

    fn read(&mut self, root: &SystemRoot, path: &Path) -> Result<(), CommandFailure> {
        let text = root.text(path).context(format_args!("cannot read {}", root.shown(path).display()))?;
        self.parse(&text);
        Ok(())
    }

    fn parse(&mut self, text: &str) {
        let joined = text.replace("\\\n", " ");
        let mut in_service = false;
        for line in joined.lines().map(str::trim) {
            if line.starts_with('[') {
                in_service = line == "[Service]";
            } else if let Some((key, value)) = line.split_once('=')
                && in_service
                && !line.starts_with(['#', ';'])
            {
                self.settings.push((key.trim().to_owned(), value.trim().to_owned()));
            }
        }
    }

    /// All values of a list, since an empty one reset it.
    pub(super) fn values(&self, key: &str) -> Vec<&str> {
        let mut all = Vec::new();
        for (_, value) in self.settings.iter().filter(|(name, _)| name == key) {
            match value.is_empty() {
                true => all.clear(),
                false => all.push(value.as_str()),
            }
        }
        all
    }

    /// The value of a key of which the last counts.
    pub(super) fn last(&self, key: &str) -> Option<&str> {
        self.settings.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The value of a variable in its `Environment=`.
    pub(super) fn environment(&self, variable: &str) -> Option<String> {
        let assignments = self.values("Environment").into_iter().flat_map(words);
        let mut values =
            assignments.filter_map(|word| Some(word.strip_prefix(variable)?.strip_prefix('=')?.to_owned()));
        values.next_back()
    }

    /// The program that it starts.
    pub(super) fn program(&self) -> Option<String> {
        let command = self.values("ExecStart").into_iter().next_back()?;
        words(command.trim_start_matches(['-', '@', ':', '+', '!'])).into_iter().next()
    }
}

/// Splits a value as systemd does: at spaces outside of quotes. A backslash keeps the next character.
fn words(value: &str) -> Vec<String> {
    let (mut all, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut characters = value.chars();
    while let Some(c) = characters.next() {
        match (c, quote) {
            ('\\', _) => word.get_or_insert_default().extend(characters.next()),
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => all.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    all.extend(word);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_name_gets_its_suffix_and_cannot_leave_the_folder() {
        assert_eq!(parse_name("nginx"), Ok("nginx.service".to_owned()));
        assert_eq!(parse_name("app@blue.service"), Ok("app@blue.service".to_owned()));
        for bad in
            ["", "../x", "a/b.service", "nginx.socket", ".service", "..service", "a b", "a\nb.service", "x%y.service"]
        {
            assert!(parse_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn environment_is_that_of_the_last_assignment() {
        let mut unit = ServiceUnit::default();
        unit.parse("[Unit]\nEnvironment=LD_PRELOAD=/no.so\n[Service]\nEnvironment=A=1 \"LD_PRELOAD=/a b.so\"\n# Environment=LD_PRELOAD=/c\n");
        assert_eq!(unit.environment("LD_PRELOAD").as_deref(), Some("/a b.so"));
        unit.parse("[Service]\nEnvironment=B=2 \\\n  LD_PRELOAD=/x.so\n");
        assert_eq!(unit.environment("LD_PRELOAD").as_deref(), Some("/x.so"));
        unit.parse("[Service]\nEnvironment=\n");
        assert_eq!(unit.environment("LD_PRELOAD"), None);
    }

    #[test]
    fn program_of_exec_start_is_found_behind_its_prefixes() {
        let mut unit = ServiceUnit::default();
        unit.parse("[Service]\nExecStart=/bin/old\nExecStart=\nExecStart=-!/usr/sbin/nginx -g 'daemon on;'\n");
        assert_eq!(unit.program().as_deref(), Some("/usr/sbin/nginx"));
    }
}
