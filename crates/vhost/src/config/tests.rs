use super::*;
use std::os::unix::fs::PermissionsExt;

#[test]
fn sample_shows_every_key_with_its_default() {
    let is_key =
        |line: &str| line.starts_with('[') || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '));
    let shown = |line: &str| line.strip_prefix("# ").filter(|rest| is_key(rest)).unwrap_or(line).to_owned();
    let whole: Vec<String> = SAMPLE_CONFIG.lines().map(shown).collect();
    let sample = SwitchConfig::parse(SAMPLE_CONFIG).unwrap();
    // The user of the example need not exist here.
    let full = SwitchConfig::parse(&whole.join("\n").replace("\"libvirt-qemu\"", "\"root\"")).unwrap();
    let options = crate::engine::EngineOptions::new("");
    let (floods, age) = (options.switch.floods, options.switch.table.age / 1_000_000_000);
    let hold = u64::try_from(options.hold.as_millis()).unwrap();
    let defaults = SwitchSettings { floods: Some(floods), age: Some(age), hold: Some(hold) };
    assert_eq!((full.settings, sample.settings), (defaults, SwitchSettings::default()));
    assert_eq!(full.other_ports, sample.other_ports);
    let (sample, full) = (&sample.ports[0].spec, &full.ports[0].spec);
    assert_eq!(*full, PortSpec { owner: Some(0), ..sample.clone() });
    assert!(!sample.mac.is_empty() && sample.ip.len() == 2 && sample.rate == Some(100_000_000));
}

#[test]
fn faulty_file_is_refused_with_line_and_reason() {
    let port = "[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:01']\nip = ['10.0.0.1']\n";
    for (more, line, reason) in [
        ("colour = 1", "line 1", "unknown field `colour`"),
        ("floods = -1", "line 1", "u64"),
        ("age = 0", "line 1", "1 to 1000000 seconds"),
        ("hold = 60001", "line 1", "0 to 60000 milliseconds"),
        ("other_ports = 'no'", "line 1", "boolean"),
        ("[[port]]\nrate = 1", "line 1", "missing field `name`"),
        ("[[port]]\nname = 'a'\nmac = []", "line 3", "leave the key out to allow all"),
        ("[[port]]\nname = 'a'\nip = []", "line 3", "leave the key out to allow all"),
        ("[[port]]\nname = '../a'", "line 2", "is no name"),
        ("[[port]]\nname = 'a'\nrates = 1", "line 3", "unknown field `rates`"),
        ("[[port]]\nname = 'a'\nmac = '02:00:00:00:00:01'", "line 3", "sequence"),
        ("[[port]]\nname = 'a'\nmac = ['03:00:00:00:00:01']", "line 3", "no station's"),
        ("[[port]]\nname = 'a'\nip = ['10.0.0.1/24']", "line 3", "without a prefix length"),
        ("[[port]]\nname = 'a'\nip = ['0.0.0.0']", "line 3", "address of one host"),
        ("[[port]]\nname = 'a'\nip = ['ff02::1']", "line 3", "address of one host"),
        ("[[port]]\nname = 'a'\nip = ['127.0.0.1']", "line 3", "address of one host"),
        ("[[port]]\nname = 'a'\nip = ['::ffff:127.0.0.1']", "line 3", "address of one host"),
        ("[[port]]\nname = 'a'\nrate = 0", "line 3", "as in 100M"),
        ("[[port]]\nname = 'a'\nrate = '1T'", "line 3", "as in 100M"),
        ("[[port]]\nname = 'a'\nrate = true", "line 3", "text in quotes or a number"),
        ("[[port]]\nname = 'a'\nowner = 'no-such-user'", "line 3", "no user no-such-user"),
        ("[[port]]\nname = 'a'\nowner = -1", "line 3", "text in quotes or a number"),
        ("[[port]]\nname = 'a'\nowner = 4294967295", "line 3", "no user"),
        ("[[port]]\nname = 'a'\nowner = '4294967295'", "line 3", "no user"),
        ("[[port]]\nname = 'up0'\ntap = true\nowner = 0", "line 1", "not for an uplink"),
        ("[[port]]\nname = 'up0123456789abcd'\ntap = true", "line 1", "at most 15 characters"),
    ] {
        let refused = SwitchConfig::parse(more).unwrap_err();
        assert!(refused.contains(line) && refused.contains(reason), "{more}: {refused}");
    }
    for (more, reason) in [
        ("[[port]]\nname = 'a'", "line 6: there is a port `a` already, in line 1"),
        (
            "[[port]]\nname = 'b'\nmac = ['02:00:00:00:00:01']",
            "line 8: 02:00:00:00:00:01 is fixed to the port `a` already, in line 3",
        ),
        (
            "[[port]]\nname = 'b'\nip = ['::ffff:10.0.0.1']",
            "line 8: 10.0.0.1 is fixed to the port `a` already, in line 4",
        ),
        (
            "[[port]]\nname = 'b'\nmac = ['02:00:00:00:00:02', '02:00:00:00:00:02']",
            "line 8: 02:00:00:00:00:02 is fixed",
        ),
    ] {
        let refused = SwitchConfig::parse(&format!("{port}\n{more}")).unwrap_err();
        assert!(refused.starts_with(reason), "{more}: {refused}");
    }
}

#[test]
fn command_adds_only_ports_that_the_file_permits() {
    let text = "other_ports = true\n[[port]]\nname = 'a'\nrate = 1000\n";
    let mut config = SwitchConfig { path: "/f".into(), ..SwitchConfig::parse(text).unwrap() };
    let limited = |rate| PortSpec { rate: Some(rate), ..PortSpec::new("a") };
    assert!(config.permits(&PortSpec::new("a")).is_ok() && config.permits(&limited(1000)).is_ok());
    let refused = config.permits(&limited(2000)).unwrap_err().to_string();
    assert!(refused.starts_with("/f, line 2, fixes the port a"), "{refused}");
    assert!(config.permits(&PortSpec::new("b")).is_ok());
    config.other_ports = false;
    let refused = config.permits(&PortSpec::new("b")).unwrap_err().to_string();
    assert!(refused.starts_with("/f does not list the port b"), "{refused}");
}

#[test]
fn setting_that_contradicts_the_command_line_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lan.toml");
    std::fs::write(&path, "hold = 5\n").unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let source = |hold| {
        let settings = SwitchSettings { hold, age: Some(7), ..SwitchSettings::default() };
        ConfigSource::new(Some(&path), folder.path(), settings).unwrap().read()
    };
    assert_eq!(source(None).unwrap().unwrap().settings.hold, Some(5));
    assert!(source(Some(5)).is_ok());
    let refused = source(Some(6)).unwrap_err().to_string();
    assert!(refused.contains("`hold = 5` contradicts `--hold 6`"), "{refused}");
}

#[test]
fn file_must_be_there_only_if_command_line_names_it() {
    let path = Path::new("/nonexistent/lan.toml");
    let source = |required| ConfigSource { path: Some(path.to_owned()), required, ..ConfigSource::default() };
    assert!(source(false).read().unwrap().is_none() && source(true).read().is_err());
    assert_eq!(default_path(Path::new("/run/partywall/net/lan")), Some("/etc/partywall/net/lan.toml".into()));
    for folder in ["/run/user/7/partywall/net/lan", "/run/partywall/net", "/run/partywall/net/lan/x"] {
        assert_eq!(default_path(Path::new(folder)), None, "{folder}");
    }
}

#[test]
fn file_that_others_may_change_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lan.toml");
    std::fs::write(&path, "").unwrap();
    let read = |mode| {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        SwitchConfig::read(&path).map_err(|e| e.to_string())
    };
    assert!(read(0o644).is_ok() && read(0o400).is_ok());
    for mode in [0o664, 0o646, 0o622] {
        let refused = read(mode).unwrap_err();
        assert!(refused.contains("lan.toml: users other than its owner may write"), "{mode:o}: {refused}");
    }
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(7), None).unwrap();
        let refused = read(0o644).unwrap_err();
        assert!(refused.contains("it belongs to user 7"), "{refused}");
    }
    let refused = SwitchConfig::read(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("no regular file"), "{refused}");
    // Nobody writes into it, and the reader does not wait.
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
    let refused = SwitchConfig::read(&pipe).unwrap_err().to_string();
    assert!(refused.contains("no regular file"), "{refused}");
}

#[test]
fn file_beyond_its_bounds_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lan.toml");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        SwitchConfig::read(&path).map_err(|e| e.to_string())
    };
    let longest = "#".repeat(1 << 20);
    assert!(read(&longest).is_ok());
    let refused = read(&format!("{longest}#")).unwrap_err();
    assert!(refused.contains("more than 1048576 bytes"), "{refused}");
    let ports = |count: usize| (0..count).map(|n| format!("[[port]]\nname = 'p{n}'\n")).collect::<String>();
    assert_eq!(SwitchConfig::parse(&ports(1024)).unwrap().ports.len(), 1024);
    let refused = SwitchConfig::parse(&ports(1025)).unwrap_err();
    assert_eq!(refused, "line 2049: a file lists at most 1024 ports");
}

#[test]
fn kind_of_listed_port_counts_when_a_command_adds_it() {
    let text = "[[port]]\nname = 'up0'\ntap = true\nrate = 1000\n[[port]]\nname = 'a'\n";
    let config = SwitchConfig::parse(text).unwrap();
    let tap = |name: &str| PortSpec { tap: true, ..PortSpec::new(name) };
    assert!(config.permits(&tap("up0")).is_ok() && config.permits(&PortSpec::new("a")).is_ok());
    assert!(config.permits(&PortSpec::new("up0")).is_err() && config.permits(&tap("a")).is_err());
    assert!(config.permits(&PortSpec { rate: Some(7), ..tap("up0") }).is_err());
}
