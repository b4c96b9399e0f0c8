//! The ways to isolate domains on this host. Only the demo and tests need them; Partywall works with any or none.

use std::process::{Command, Stdio};

use super::check::Check;
use super::read_line;

const AREA: &str = "isolation";

pub(super) fn checks() -> Vec<Check> {
    vec![network_namespaces(), user_namespaces()]
}

fn network_namespaces() -> Check {
    let means =
        "the demo runs its two domains without separate network namespaces, and compares with TCP over loopback";
    let check = |found: &str| Check::ok(AREA, "network namespaces", means, found);
    if !std::path::Path::new("/proc/self/ns/net").exists() {
        return check("not in this kernel").warn("only for the demo: a kernel with CONFIG_NET_NS");
    }
    let ip = Command::new("ip").arg("-V").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    match (rustix::process::geteuid().is_root(), ip.is_ok_and(|status| status.success())) {
        (true, true) => check("we are root, and `ip netns` is there"),
        (false, _) => check("making one takes root").warn("only for the demo: run it as root"),
        (true, false) => check("the program `ip` is missing").warn("only for the demo: install iproute2"),
    }
}

fn user_namespaces() -> Check {
    let means = "unprivileged users cannot make containers; the broker's policy does not need it";
    let most = read_line("/proc/sys/user/max_user_namespaces").unwrap_or_else(|_| "none".into());
    Check::ok(AREA, "user namespaces", means, format!("at most {most}"))
}
