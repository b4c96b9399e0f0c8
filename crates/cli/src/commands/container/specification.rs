//! The specification: what a container with the device gets, as CDI 0.3 says it (podman 4.1, docker 25 and containerd 1.7 read it).

use std::path::Path;

use partywall_protocol::environment;
use serde_json::{Value, json};

/// Who makes the device, and what it is.
pub(super) const KIND: &str = "partywall.dev/host";
/// The device as engines name it.
pub(super) const DEVICE: &str = "partywall.dev/host=all";

/// The broker links its socket into this folder of the host.
pub(super) const SOCKET_FOLDER: &str = "/run/partywall/containers";

/// Where the library's folder is in a container.
pub(super) const LIBRARY_FOLDER: &str = "/usr/lib/partywall";

/// glibc puts the folder of the image's libraries in place of `$LIB` (`lib`, `lib64`, `lib/x86_64-linux-gnu`), and finds the library there. musl looks for a
/// folder that is called `$LIB`, and finds a note for the container's log. With the library itself, musl's programs would not start.
pub(super) const PRELOAD: &str = "/usr/lib/partywall/$LIB/libpartywall_preload.so";

/// The specification for a host with the library in this folder.
pub(super) fn of(library: &Path) -> Value {
    // Folders, not files: a bound file would stay the old one after the broker's restart or the library's upgrade.
    let mount = |host: &Path, container: &str| {
        json!({
            "hostPath": host,
            "containerPath": container,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    json!({
        "cdiVersion": "0.3.0",
        "kind": KIND,
        "devices": [{
            "name": "all",
            "containerEdits": {
                "env": [format!("{}={PRELOAD}", environment::PRELOAD)],
                "mounts": [
                    mount(library, LIBRARY_FOLDER),
                    // Read-only: a container can connect to the socket, and neither remove nor replace it.
                    mount(Path::new(SOCKET_FOLDER), "/run/partywall"),
                ],
            },
        }],
    })
}
