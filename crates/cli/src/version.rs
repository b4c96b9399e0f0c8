//! The additional output of `--version`: the commit, and the versions of protocols that other programs must agree on.

use std::sync::LazyLock;

/// The commit, if the build was told (`make build` tells it).
const COMMIT: Option<&str> = option_env!("PARTYWALL_COMMIT");

/// The text of `partywall --version`; `-V` prints the number alone.
pub(crate) fn long() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = COMMIT.filter(|commit| !commit.is_empty()).unwrap_or("unknown (not built by `make build`)");
        format!(
            "{}\ncommit: {commit}\nprotocol: control {}, memory {}, directory {}, status {}\nfeatures: streams, messages, broadcast, groups, calls, \
             unmodified programs (TCP, UDP), virtual machines, network switch (vhost-user), disks (vhost-user), file systems (FUSE), containers (CDI), services \
             (systemd)\nbuilt for: {}-linux, {}",
            env!("CARGO_PKG_VERSION"),
            partywall_protocol::wire::VERSION,
            partywall_shm::layout::VERSION,
            partywall_protocol::directory::VERSION,
            partywall_shm::status::VERSION,
            std::env::consts::ARCH,
            if cfg!(debug_assertions) { "development" } else { "release" },
        )
    });
    &TEXT
}
