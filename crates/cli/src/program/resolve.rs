//! The file that a command refers to: along PATH, and through the `#!` lines of scripts.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::exit::{Code, CommandFailure, Context};

/// The most `#!` lines that the kernel follows.
const DEPTH: usize = 5;
/// How much of a script's first line the kernel reads.
const LINE: u64 = 256;
/// Where commands are looked for when nothing says where.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The file that `command` means: itself if it has a slash, else the first of that name along PATH that can be run.
pub(crate) fn find(command: &OsStr) -> Result<PathBuf, CommandFailure> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    find_along(command, &path)
}

fn find_along(command: &OsStr, path: &OsStr) -> Result<PathBuf, CommandFailure> {
    let shown = command.display();
    let absent = || CommandFailure::new(Code::NotFound, format!("there is no program `{shown}`"));
    if command.is_empty() {
        return Err(absent());
    }
    if command.as_bytes().contains(&b'/') {
        let path = PathBuf::from(command);
        return if path.exists() { runnable(path) } else { Err(absent()) };
    }
    let candidates = std::env::split_paths(path).map(|dir| dir.join(command)).filter(|candidate| candidate.is_file());
    let mut found = None;
    for candidate in candidates {
        match runnable(candidate) {
            Ok(path) => return Ok(path),
            // The shell goes on looking, and complains about the first.
            Err(failure) => found = found.or(Some(failure)),
        }
    }
    Err(found.unwrap_or_else(|| absent().hint("it is not in any directory of PATH")))
}

fn runnable(path: PathBuf) -> Result<PathBuf, CommandFailure> {
    let shown = path.display();
    if path.is_dir() {
        return Err(CommandFailure::new(Code::NotExecutable, format!("{shown} is a directory")));
    }
    access(&path, Access::EXEC_OK)
        .map_err(|error| CommandFailure::new(Code::NotExecutable, format!("{shown} cannot be run: {error}")))?;
    Ok(path)
}

/// If `path` is a script, the interpreter that its first line names, and that one's, down to a program. `env` is seen through.
pub(crate) fn interpreters(path: &Path) -> Result<Vec<PathBuf>, CommandFailure> {
    let mut all: Vec<PathBuf> = Vec::new();
    while let Some((interpreter, argument)) = shebang(all.last().map_or(path, PathBuf::as_path))? {
        if all.len() == DEPTH {
            let message =
                format!("{} is a script for a script for a script, deeper than the kernel goes", path.display());
            return Err(CommandFailure::new(Code::NotExecutable, message));
        }
        let name = |what: &OsStr| {
            let failed =
                |e: CommandFailure| e.context(format_args!("the first line of {} names no program", path.display()));
            find(what).map_err(failed)
        };
        let next = name(interpreter.as_os_str())?;
        let is_env = next.file_name() == Some(OsStr::new("env"));
        all.push(match argument.as_deref().and_then(named_by_env).filter(|_| is_env) {
            Some(wanted) => name(&wanted)?,
            None => next,
        });
    }
    Ok(all)
}

/// The interpreter and its argument, if the file begins with `#!`.
fn shebang(path: &Path) -> Result<Option<(PathBuf, Option<OsString>)>, CommandFailure> {
    let mut head = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LINE).read_to_end(&mut head));
    match read {
        // It may be run although it may not be read.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(None),
        other => other.context(format_args!("cannot read {}", path.display()))?,
    };
    Ok(parse_shebang(&head))
}

fn parse_shebang(head: &[u8]) -> Option<(PathBuf, Option<OsString>)> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = line.trim_ascii();
    let end = line.iter().position(|byte| byte.is_ascii_whitespace()).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(end);
    if interpreter.is_empty() {
        return None;
    }
    let argument = Some(argument.trim_ascii()).filter(|argument| !argument.is_empty());
    Some((PathBuf::from(OsStr::from_bytes(interpreter)), argument.map(|a| OsString::from_vec(a.to_vec()))))
}

/// The command that `env` is to run: its first argument that is neither an option nor a variable.
fn named_by_env(argument: &OsStr) -> Option<OsString> {
    // With -S the kernel's one argument is many; without, it is one word all the same.
    let words = argument.as_bytes().split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let command = words.map(|word| word.strip_prefix(b"-S").unwrap_or(word));
    command
        .into_iter()
        .find(|word| !word.is_empty() && !word.starts_with(b"-") && !word.contains(&b'='))
        .map(|word| OsString::from_vec(word.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn command_is_resolved_along_path_as_by_shell() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        for sub in [&one, &two] {
            std::fs::create_dir(sub).unwrap();
        }
        write(&one.join("tool"), "", 0o644);
        write(&two.join("tool"), "", 0o755);
        let path = std::env::join_paths([&one, &two]).unwrap();
        assert_eq!(find_along(OsStr::new("tool"), &path).unwrap(), two.join("tool"));
        assert_eq!(find_along(OsStr::new("none"), &path).unwrap_err().code, Code::NotFound);
        assert_eq!(find_along(OsStr::new(""), &path).unwrap_err().code, Code::NotFound);
        assert_eq!(find_along(dir.path().join("x/y").as_os_str(), &path).unwrap_err().code, Code::NotFound);
        assert_eq!(find_along(dir.path().as_os_str(), &path).unwrap_err().code, Code::NotExecutable);
        assert_eq!(find_along(one.join("tool").as_os_str(), &path).unwrap_err().code, Code::NotExecutable);
        assert_eq!(find_along(OsStr::new("tool"), one.as_os_str()).unwrap_err().code, Code::NotExecutable);
    }

    #[test]
    fn first_lines_are_read_as_the_kernel_does() {
        let parse = |text: &str| parse_shebang(text.as_bytes());
        assert_eq!(parse("#!/bin/sh\necho"), Some(("/bin/sh".into(), None)));
        assert_eq!(parse("#!  /usr/bin/env  python3 \n"), Some(("/usr/bin/env".into(), Some("python3".into()))));
        assert_eq!(parse("#!\n"), None);
        assert_eq!(parse("\x7fELF"), None);
        let env = |text: &str| named_by_env(OsStr::new(text)).map(|name| name.into_string().unwrap());
        assert_eq!(env("python3").as_deref(), Some("python3"));
        assert_eq!(env("-S python3 -u").as_deref(), Some("python3"));
        assert_eq!(env("-Spython3 -u").as_deref(), Some("python3"));
        assert_eq!(env("-i A=b perl").as_deref(), Some("perl"));
        assert_eq!(env("-i"), None);
    }

    #[test]
    fn scripts_lead_to_a_program() {
        let dir = tempfile::tempdir().unwrap();
        let (inner, outer, looped) = (dir.path().join("inner"), dir.path().join("outer"), dir.path().join("looped"));
        write(&inner, "#!/bin/sh\n", 0o755);
        write(&outer, &format!("#!{}\n", inner.display()), 0o755);
        write(&looped, &format!("#!{}\n", looped.display()), 0o755);
        assert_eq!(interpreters(&outer).unwrap(), [inner, PathBuf::from("/bin/sh")]);
        assert_eq!(interpreters(&looped).unwrap_err().code, Code::NotExecutable);
        assert!(interpreters(Path::new("/bin/sh")).unwrap().is_empty());
        let broken = dir.path().join("broken");
        write(&broken, "#!/nonexistent/interpreter\n", 0o755);
        let error = interpreters(&broken).unwrap_err();
        assert!(error.code == Code::NotFound && error.to_string().contains("first line of"), "{error}");
    }
}
