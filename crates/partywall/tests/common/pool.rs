//! An embedded broker with groups, for a test whose process administers it.

use partywall_daemon::{Broker, Config};

/// It ends with this value, and its folder goes.
pub(crate) struct PoolBroker {
    // Fields drop in order: the broker ends before its folder goes.
    pub(crate) broker: Broker,
    _dir: tempfile::TempDir,
}

impl PoolBroker {
    /// A broker with these groups: name, domains, and room in bytes.
    pub(crate) fn start(groups: &[(&str, &[&str], usize)]) -> Self {
        super::watch_all();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.toml");
        let mut policy = format!("administrators = [{}]\n", rustix::process::geteuid().as_raw());
        for (name, domains, room) in groups {
            policy += &format!("[[group]]\nname = \"{name}\"\ndomains = {domains:?}\nroom = {room}\n");
        }
        std::fs::write(&file, policy).unwrap();
        let broker = Broker::start(&Config::new(dir.path().join("sock")).policy_file(file)).unwrap();
        Self { broker, _dir: dir }
    }

    /// The broker ends before the test does.
    pub(crate) fn stop(self) {
        self.broker.stop().unwrap();
    }
}
