//! Servers that give root's rights up after their start: as whom their workers then run.

use std::path::{Path, PathBuf};

/// A server, and where its configuration names the user.
struct Server {
    programs: &'static [&'static str],
    file: &'static str,
    key: &'static str,
    /// The user if the file does not say; empty if it then stays root.
    usual: &'static str,
}

const SERVERS: [Server; 5] = [
    Server { programs: &["nginx"], file: "/etc/nginx/nginx.conf", key: "user", usual: "nobody" },
    Server {
        programs: &["apache2", "apache2ctl"],
        file: "/etc/apache2/envvars",
        key: "APACHE_RUN_USER",
        usual: "www-data",
    },
    Server { programs: &["httpd"], file: "/etc/httpd/conf/httpd.conf", key: "User", usual: "apache" },
    Server { programs: &["haproxy"], file: "/etc/haproxy/haproxy.cfg", key: "user", usual: "" },
    Server { programs: &["lighttpd"], file: "/etc/lighttpd/lighttpd.conf", key: "server.username", usual: "" },
];

/// The user of a server's workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    /// Its name, or number.
    pub(crate) user: String,
    /// The configuration that says so; `None` if it is the server's default.
    pub(crate) file: Option<PathBuf>,
}

/// As whom the workers of this program run if root starts it; `None` if it is no such server, as far as is known here.
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

/// What a line `KEY VALUE`, `KEY = "VALUE"` or `export KEY=VALUE` says.
fn value(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.split('#').next().unwrap_or_default();
        let separates = |c: char| c.is_whitespace() || matches!(c, '=' | ';' | '"' | '\'');
        let mut words = line.split(separates).filter(|word| !word.is_empty()).skip_while(|word| *word == "export");
        if words.next()? == key { words.next().map(str::to_owned) } else { None }
    })
}

/// The number of a user, and of its group, from the text of /etc/passwd.
pub(crate) fn ids(passwd: &str, user: &str) -> Option<(u32, u32)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        if name == user || uid == user { Some((uid.parse().ok()?, gid.parse().ok()?)) } else { None }
    })
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
        assert_eq!(ids(passwd, "www-data"), Some((33, 34)));
        assert_eq!(ids(passwd, "33"), Some((33, 34)));
        assert_eq!(ids(passwd, "www"), None);
    }

    #[test]
    fn nginx_is_a_server_that_gives_rights_up_and_a_shell_is_none() {
        assert!(of(Path::new("/usr/sbin/nginx")).is_some());
        assert_eq!(of(Path::new("/bin/sh")), None);
    }
}
