//! A broker of the bench's own: started as a child on a private socket, and gone with this value.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    process::GuardedChild,
};

/// The program that is started.
const PROGRAM: &str = "partywalld";

/// Servers run as separate users, and one of them has a hundred thousand listeners.
const POLICY: &str = "administrators = [0]
[quota]
listeners = 262144
[[join]]
domain = \"*\"
users = [\"*\"]
[[connect]]
from = \"*\"
to = \"*\"
";

/// A running broker.
#[derive(Debug)]
pub(crate) struct BrokerProcess {
    socket: PathBuf,
    child: Option<GuardedChild>,
}

impl BrokerProcess {
    /// Starts one that listens in `folder`, and waits until it does.
    pub(crate) fn start(folder: &Path, interrupt: &Interrupt) -> Result<Self> {
        Self::start_with(folder, POLICY, interrupt)
    }

    /// The same with another policy.
    pub(crate) fn start_with(folder: &Path, rules: &str, interrupt: &Interrupt) -> Result<Self> {
        let program = find(PROGRAM)?;
        let socket = folder.join("broker.sock");
        let mut command = Command::new(&program);
        let policy = folder.join("policy.toml");
        std::fs::write(&policy, rules).during("writing the broker's policy")?;
        command.arg("--socket").arg(&socket).arg("--policy").arg(&policy).stdin(Stdio::null()).stdout(Stdio::null());
        // Its usual log would bury the tables: two domains come and go with every measurement.
        command.env(partywall_protocol::environment::LOG_FILTER, "warn");
        let mut child = GuardedChild::spawn(&mut command)?;
        let deadline = Instant::now() + Duration::from_secs(60);
        while !listens(&socket) {
            interrupt.check()?;
            if let Some(end) = child.ended() {
                return Err(BenchError::Transport(format!("{} ended at once: {end}", program.display())));
            }
            if Instant::now() > deadline {
                return Err(BenchError::Transport(format!(
                    "{} does not listen on {}",
                    program.display(),
                    socket.display()
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { socket, child: Some(child) })
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.as_ref().map(GuardedChild::id)
    }
}

impl Drop for BrokerProcess {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            child.terminate(Duration::from_secs(2));
        }
    }
}

fn listens(socket: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let attempt = || {
        let address = SocketAddrUnix::new(socket)?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(fd, &address)
    };
    attempt().is_ok()
}

/// Beside this program, one folder up (where test programs are built), or on the path.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let beside = env::current_exe().ok().into_iter().flat_map(|exe| {
        let folder = exe.parent().map(Path::to_owned);
        let above = folder.as_deref().and_then(Path::parent).map(Path::to_owned);
        [folder, above].into_iter().flatten()
    });
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<PathBuf> = env::split_paths(&path).collect();
    beside.chain(on_path).map(|folder| folder.join(name)).find(|program| program.is_file()).ok_or_else(|| {
        BenchError::Unavailable(format!(
            "no {name} beside this program or on the path; build it (cargo build --release)"
        ))
    })
}
