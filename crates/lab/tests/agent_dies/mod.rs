//! The agent of a guest is killed while it has a connection in TCP's repair mode (protocol T3.5). The connection goes on.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../preload/tests/support/c.rs"]
mod c;

use crate::world::{Inside, World};
use crate::{rings, told_talk};
use partywall_lab::{Guest, ImageOptions};
use std::path::{Path, PathBuf};

/// Starts a program without the right to end the mode. Without the path, the shell would start busybox's program of that name.
const WITHOUT_NET_ADMIN: &str = "/bin/setpriv --bounding-set=-net_admin --inh-caps=-net_admin";
const LIBRARY: &str = "libdie_reading.so";

/// The image with what the test needs.
pub(crate) fn with(image: ImageOptions) -> ImageOptions {
    image.program(library(), LIBRARY).program("/usr/bin/setpriv", "setpriv")
}

/// A library that kills the agent where it is in the middle of reading.
fn library() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/driver/die_reading.c");
    c::library("die_reading", &[source.to_str().unwrap()], &[])
}

/// The agent of guest `b`, whose kernel does not record numbers, dies with the connection of a client in repair mode. First the client has
/// the right to end the mode, and does so while no agent runs. Then the client lacks the right, and the next agent ends the mode.
///
/// An order names the queue of the connection at whose choice the agent dies, and at which time. With a queue chosen, `send` would return success
/// without sending.
pub(crate) fn repair_mode_of_killed_agent_ends(world: &World, a: &Guest, b: &Guest) {
    let next_agent = "partywall-agent --log debug >> /tmp/agent.log 2>&1 & echo $! > /tmp/agent.pid";
    let has_rings = &*rings(1);
    let is_dead = "[ -e /tmp/dead ]";
    for (launcher, order, then, until) in
        [("", "1 2 self", "true", is_dead), (WITHOUT_NET_ADMIN, "2 1 self", next_agent, has_rings)]
    {
        b.sh(&format!(
            "rm -f /tmp/agent.pid /tmp/dead; echo '{order}' > /tmp/order; \
             (DIE_READING=/tmp/order LD_PRELOAD=/bin/{LIBRARY} partywall-agent --log debug > /tmp/agent.log 2>&1; \
             echo $? > /tmp/dead; {then}) > /dev/null 2>&1 & true"
        ));
        world.wait_ready(2);
        let logs = told_talk(a, b, ("exec_server.py", ""), launcher, &[(until, "talk 200")]);
        let said = b.sh("cat /tmp/dead; ls /tmp/order 2>&1; cat /tmp/agent.log");
        let was_killed = said.starts_with("137") && !said.contains("\n/tmp/order");
        assert!(was_killed, "the agent was not killed: {said}\n{logs:?}");
    }
}
