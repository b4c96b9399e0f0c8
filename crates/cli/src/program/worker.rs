//! Servers that give up root's rights after their start: the user of their workers, and whether that user may join the broker.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use partywall::{PolicyDecision, PolicyRequest, PolicyUser};

use crate::admission::SocketAdmission;
use crate::args::Global;
use crate::exit::CommandFailure;
use crate::program::Program;
use crate::session;

/// A server, and where its configuration names the user.
struct ServerConfiguration {
    programs: &'static [&'static str],
    file: &'static str,
    key: &'static str,
    /// The user if the file does not say; empty if it then stays root.
    usual: &'static str,
}

const SERVERS: [ServerConfiguration; 5] = [
    ServerConfiguration { programs: &["nginx"], file: "/etc/nginx/nginx.conf", key: "user", usual: "nobody" },
    ServerConfiguration {
        programs: &["apache2", "apache2ctl"],
        file: "/etc/apache2/envvars",
        key: "APACHE_RUN_USER",
        usual: "www-data",
    },
    ServerConfiguration { programs: &["httpd"], file: "/etc/httpd/conf/httpd.conf", key: "User", usual: "apache" },
    ServerConfiguration { programs: &["haproxy"], file: "/etc/haproxy/haproxy.cfg", key: "user", usual: "" },
    ServerConfiguration {
        programs: &["lighttpd"],
        file: "/etc/lighttpd/lighttpd.conf",
        key: "server.username",
        usual: "",
    },
];

/// The user of a server's workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    /// Its name, or number.
    pub(crate) user: String,
    /// The configuration file with the user; `None` if it is the server's default.
    pub(crate) file: Option<PathBuf>,
}

/// The user of this program's workers if root starts it; `None` if it is not known as such a server.
pub(crate) fn of(program: &Path) -> Option<Worker> {
    let name = program.file_name()?.to_str()?;
    let server = SERVERS.iter().find(|server| server.programs.contains(&name))?;
    let text = std::fs::read_to_string(server.file).unwrap_or_default();
    match value(&text, server.key) {
        Some(user) => Some(Worker { user, file: Some(server.file.into()) }),
        None if server.usual.is_empty() => None,
        None => Some(Worker { user: server.usual.to_owned(), file: None }),
    }
}

/// The number of the user of this program's workers if root starts it.
pub(crate) fn user_of(program: &Path) -> Option<u32> {
    Some(ids(&of(program)?.user)?.0)
}

/// The broker's answer to the workers of a server.
#[derive(Debug)]
pub(crate) enum Standing {
    /// They may join under this name, on these grounds.
    May { name: String, grounds: String },
    /// They may not; the rule would allow it.
    MayNot { name: String, grounds: String, rule: String },
    /// The file of the broker's socket does not let them connect.
    ShutOut { socket: SocketAdmission },
    /// The user is unknown, for this reason.
    Unknown(String),
}

/// Asks the broker whether the workers of this program may join.
pub(crate) fn standing(global: &Global, program: &Program, worker: &Worker) -> Standing {
    let Some((uid, gid)) = ids(&worker.user) else {
        return Standing::Unknown(format!("there is no user {}", worker.user));
    };
    if let Some(socket) = SocketAdmission::of(&session::broker_path(global))
        && !socket.admits(uid, &groups(&worker.user, gid))
    {
        return Standing::ShutOut { socket };
    }
    let name = program.domain(global);
    match ask(global, PolicyUser::Host { uid, gid: Some(gid) }, &name) {
        Ok(PolicyDecision { allowed: true, grounds, .. }) => Standing::May { name, grounds },
        Ok(PolicyDecision { grounds, .. }) => {
            let rule = session::rule_to_join(&name, uid);
            Standing::MayNot { name, grounds, rule }
        }
        Err(failure) => Standing::Unknown(failure.to_string().lines().next().unwrap_or_default().to_owned()),
    }
}

fn ask(global: &Global, user: PolicyUser, name: &str) -> Result<PolicyDecision, CommandFailure> {
    Ok(session::join(global)?.test_policy(user, name, PolicyRequest::Join)?)
}

/// The value in a line `KEY VALUE`, `KEY = "VALUE"` or `export KEY=VALUE`.
fn value(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.split('#').next().unwrap_or_default();
        let separates = |c: char| c.is_whitespace() || matches!(c, '=' | ';' | '"' | '\'');
        let mut words = line.split(separates).filter(|word| !word.is_empty()).skip_while(|word| *word == "export");
        if words.next()? == key { words.next().map(str::to_owned) } else { None }
    })
}

/// The number of a user, and of its group, by a name or number. `None` if the system knows no such user.
///
/// `getent` asks all sources of the host's users (LDAP, SSSD, systemd's dynamic users), also for a static build of this program, whose C library
/// could not. Where it is missing or fails, /etc/passwd is read.
pub(crate) fn ids(user: &str) -> Option<(u32, u32)> {
    let output =
        Command::new("getent").args(["passwd", "--", user]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    // The line may have the name in another spelling than was asked for.
    let found = output.ok().and_then(|output| numbers(String::from_utf8_lossy(&output.stdout).lines().next()?));
    found.or_else(|| ids_in(&std::fs::read_to_string("/etc/passwd").ok()?, user))
}

/// The numbers of all groups of a user, whose own group is known.
fn groups(user: &str, own: u32) -> Vec<u32> {
    let output = Command::new("id").args(["-G", "--", user]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let said = output.map(|output| output.stdout).unwrap_or_default();
    let more = String::from_utf8_lossy(&said).split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect();
    [vec![own], more].concat()
}

/// User and group of a line in the format of /etc/passwd.
fn numbers(line: &str) -> Option<(u32, u32)> {
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// As [`ids`], from the text of /etc/passwd.
fn ids_in(passwd: &str, user: &str) -> Option<(u32, u32)> {
    let is_user = |line: &&str| line.split(':').next() == Some(user) || line.split(':').nth(2) == Some(user);
    passwd.lines().find(is_user).and_then(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_read_from_each_kind_of_configuration() {
        for (text, key, user) in [
            ("# user root;\nworker_processes auto;\nuser www-data;\n", "user", Some("www-data")),
            ("user  web  web-group;", "user", Some("web")),
            ("export APACHE_RUN_USER=www-data\n", "APACHE_RUN_USER", Some("www-data")),
            ("global\n    user haproxy\n", "user", Some("haproxy")),
            ("server.username             = \"lighty\"\n", "server.username", Some("lighty")),
            ("events {}\n", "user", None),
        ] {
            assert_eq!(value(text, key).as_deref(), user, "{text}");
        }
    }

    #[test]
    fn ids_are_found_by_name_and_by_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:34:www:/var/www:/bin/false\n";
        assert_eq!(ids_in(passwd, "www-data"), Some((33, 34)));
        assert_eq!(ids_in(passwd, "33"), Some((33, 34)));
        assert_eq!(ids_in(passwd, "www"), None);
    }

    #[test]
    fn groups_of_a_user_contain_its_own() {
        assert!(groups("root", 0).contains(&0));
        assert_eq!(groups("no-such-user-of-partywall", 77), [77]);
    }

    #[test]
    fn user_of_the_system_is_found_and_an_option_is_no_user() {
        assert_eq!(ids("root"), Some((0, 0)));
        assert_eq!(ids("0"), Some((0, 0)));
        for absent in ["no-such-user-of-partywall", "--help", ""] {
            assert_eq!(ids(absent), None, "{absent}");
        }
    }

    #[test]
    fn nginx_is_a_server_that_gives_rights_up_and_a_shell_is_none() {
        assert!(of(Path::new("/usr/sbin/nginx")).is_some());
        assert_eq!(of(Path::new("/bin/sh")), None);
    }
}
