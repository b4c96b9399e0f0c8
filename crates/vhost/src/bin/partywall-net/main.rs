//! `partywall-net`: runs a switch, and asks a running one.

mod manual;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use partywall_terminal::{bytes, printable, table, whole};
use partywall_vhost::attach::CardSettings;
use partywall_vhost::config::{
    ConfigSource, LONGEST_AGE, LONGEST_HOLD, SAMPLE_CONFIG, SwitchSettings, parse_host_address, parse_rate,
};
use partywall_vhost::control::{
    self, ControlRequest, EngineHandle, FoundSwitch, PortReport, PortSpec, ReloadReport, SwitchControl, SwitchReport,
};
use partywall_vhost::engine::{Engine, EngineOptions};
use partywall_vhost::switch::MacAddress;
use partywall_vhost::{PAIRS, VhostError, attach, check_access, machine_user};
use rustix::fs::{FlockOperation, Mode, OFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// The smallest that IPv4 allows. Linux refuses a card with less.
const SHORTEST_MTU: u16 = 68;

const AFTER: &str = "\
A switch connects network cards of virtual machines on this host, and tap devices. The machines need only a virtio network \
card. A frame is copied once, from the sending machine's memory to the receiving machine's.

A machine's memory must be shared with the switch: -object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram.
A restarted switch has its added ports again, and machines reconnect automatically.
A file fixes ports and their limits: /etc/partywall/net/NAME.toml for a switch in /run/partywall/net, or the file of --config.

Examples:
  partywall net run lan --port a --port b --tap up0     a switch with two ports and an uplink, in the foreground
  partywall net args lan a                              options to start a machine with on port a
  partywall net add lan c --mac 52:54:00:00:00:0c --ip 10.0.0.12 --rate 100M
  partywall net attach lan c --qmp /run/c.qmp           plug a card into a running machine
  partywall net detach lan c --qmp /run/c.qmp           and remove it
  partywall net run lan --check                         check the switch's file
  partywall net reload lan                              bring the changed file into force
  partywall net list                                    the switches of this host
  partywall net show lan
  partywall net remove lan c

Exit codes:
  0   success, or stopped by a signal
  1   a failure
  2   wrong usage: unknown flag, value out of range";

const COLUMNS: &str = "\
Columns, counted since the port was added:
  STATE       up: a driver uses the card; no driver: a machine is connected; no machine; uplink, or no device, of a tap device
  OUT         frames that the machine has sent, and SENT their bytes
  IN          frames that the machine has received, and RECEIVED their bytes
  NO BUFFERS  frames for the machine that were lost because it had no receive buffer
  REFUSED     its frames with a forbidden source address, beyond the limit of floods, or malformed
  ERRORS      times that its driver or QEMU broke the rules";

/// A network switch for virtual machines without Partywall inside
#[derive(Debug, Parser)]
#[command(name = "partywall net", version, after_help = AFTER, arg_required_else_help = true)]
struct Cli {
    /// Folder of all switches [default: /run/partywall/net for root, else $XDG_RUNTIME_DIR/partywall/net]
    #[arg(long, global = true, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Print a sample file of a switch, with every key explained, and exit
    #[arg(long, exclusive = true)]
    print_sample_config: bool,
    /// Print the page partywall-net.toml(5) of the manual, and exit
    #[arg(long, exclusive = true)]
    print_manual: bool,
    #[command(subcommand)]
    command: Option<NetCommand>,
}

#[derive(Debug, Subcommand)]
enum NetCommand {
    /// Run a switch in the foreground
    Run {
        /// Name of the switch
        switch: String,
        /// The file that fixes ports and their limits [default: /etc/partywall/net/NAME.toml if there is one, for a switch in /run/partywall/net]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Only check the file; without a file, this fails
        #[arg(long)]
        check: bool,
        /// A port for a machine's card; may be repeated
        #[arg(long = "port", value_name = "PORT")]
        ports: Vec<String>,
        /// A tap device of the host as an uplink, made if it does not exist; may be repeated
        #[arg(long = "tap", value_name = "DEVICE")]
        taps: Vec<String>,
        /// Microseconds to poll empty queues before sleeping; 0 sleeps at once
        #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
        spin: u64,
        /// Milliseconds that a frame waits for a machine without receive buffers; 0 drops it at once [default: that of the file, or 20]
        #[arg(long, value_name = "MILLISECONDS", value_parser = partywall_terminal::whole::<u64>(0..=LONGEST_HOLD))]
        hold: Option<u64>,
        /// Frames a second that each port may flood to all others; 0 is no limit [default: that of the file, or 2000]
        #[arg(long, value_name = "FRAMES")]
        floods: Option<u64>,
        /// Seconds until the address of a silent machine is forgotten [default: that of the file, or 300]
        #[arg(long, value_name = "SECONDS", value_parser = partywall_terminal::whole::<u64>(1..=LONGEST_AGE))]
        age: Option<u64>,
    },
    /// Bring the changed file of a running switch into force; an invalid file changes nothing
    Reload {
        /// The switch
        switch: String,
    },
    /// Add a port to a running switch
    Add {
        /// The switch
        switch: String,
        #[command(flatten)]
        port: PortArgs,
    },
    /// Remove a port from a running switch
    Remove {
        /// The switch
        switch: String,
        /// The port
        port: String,
    },
    /// Show the switches of this host
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the ports of a switch and their counters
    #[command(after_help = COLUMNS)]
    Show {
        /// The switch
        switch: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the Ethernet addresses that a switch knows
    Table {
        /// The switch
        switch: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the options for QEMU, or the XML for libvirt, of a machine with a card on a port
    Args {
        /// The switch
        switch: String,
        /// The port
        port: String,
        #[command(flatten)]
        card: CardArgs,
        /// Print XML for `virsh edit`
        #[arg(long)]
        libvirt: bool,
    },
    /// Plug a card on a port into a running QEMU; the port is added if the switch does not have it
    Attach {
        /// The switch
        switch: String,
        #[command(flatten)]
        port: PortArgs,
        #[command(flatten)]
        card: CardArgs,
        /// The machine's monitor: the PATH of -qmp unix:PATH,server=on,wait=off
        #[arg(long, value_name = "SOCKET")]
        qmp: PathBuf,
    },
    /// Remove the card on a port from a running QEMU; the switch keeps the port
    Detach {
        /// The switch
        switch: String,
        /// The port
        port: String,
        /// The machine's monitor: the PATH of -qmp unix:PATH,server=on,wait=off
        #[arg(long, value_name = "SOCKET")]
        qmp: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct CardArgs {
    /// Pairs of queues of the card, 1 to 4; a guest uses one for each of its processors
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u16>(1..=PAIRS as u16))]
    queues: u16,
    /// Largest packet that the guest sends, in bytes, 68 to 65535 [default: the guest's own, usually 1500]
    #[arg(long, value_name = "BYTES", value_parser = whole::<u16>(SHORTEST_MTU..=u16::MAX))]
    mtu: Option<u16>,
}

impl CardArgs {
    fn settings(&self) -> CardSettings {
        CardSettings { queues: self.queues, mtu: self.mtu }
    }
}

#[derive(Debug, clap::Args)]
struct PortArgs {
    /// The port: the name of its socket, or of its tap device
    port: String,
    /// The port is a tap device of the host, made if it does not exist
    #[arg(long)]
    tap: bool,
    /// An Ethernet address that only this port may send from; may be repeated [default: all]
    #[arg(long, value_name = "ADDRESS")]
    mac: Vec<MacAddress>,
    /// An IP address that the port may send from; may be repeated [default: all]
    #[arg(long, value_name = "ADDRESS", value_parser = parse_host_address)]
    ip: Vec<IpAddr>,
    /// Bytes a second that the port may send, with K, M or G [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_rate)]
    rate: Option<u64>,
    /// The user whose QEMU may connect [default: the user of the machine's QEMU for `attach`, otherwise the user of the switch]
    #[arg(long, value_name = "USER", value_parser = partywall_vhost::user_number)]
    owner: Option<u32>,
}

impl PortArgs {
    fn spec(&self) -> PortSpec {
        PortSpec {
            name: self.port.clone(),
            tap: self.tap,
            mac: self.mac.clone(),
            ip: self.ip.clone(),
            rate: self.rate,
            owner: self.owner,
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    partywall_terminal::log_of_service_to_stderr("info");
    partywall_terminal::end("partywall net", run(&cli))
}

fn run(cli: &Cli) -> Result<(), VhostError> {
    let all = || -> Result<PathBuf, VhostError> {
        let all = cli.folder.clone().or_else(control::default_folder);
        let all = all.ok_or_else(|| VhostError::Refused("XDG_RUNTIME_DIR is not set; use --folder".into()))?;
        // QEMU may run in another folder.
        std::path::absolute(&all).map_err(VhostError::file_error("find", &all))
    };
    let folder = |switch: &str| -> Result<PathBuf, VhostError> {
        control::check_name(switch)?;
        Ok(all()?.join(switch))
    };
    if cli.print_sample_config {
        return print(SAMPLE_CONFIG.as_bytes());
    }
    if cli.print_manual {
        let page = manual::config_page();
        return print(&page.map_err(|source| VhostError::System { call: "make the manual page", source })?);
    }
    let Some(command) = &cli.command else {
        Cli::command().error(ErrorKind::MissingSubcommand, "a subcommand is required; --help lists them").exit()
    };
    match command {
        NetCommand::Run { switch, config, check, ports, taps, spin, hold, floods, age } => {
            let mut options = EngineOptions::new(folder(switch)?);
            let settings = SwitchSettings { floods: *floods, age: *age, hold: *hold };
            let source = ConfigSource::new(config.as_deref(), &options.folder, settings)?;
            if *check {
                return check_file(&source);
            }
            options.spin = Duration::from_micros(*spin);
            options.hold = hold.map_or(options.hold, Duration::from_millis);
            options.switch.floods = floods.unwrap_or(options.switch.floods);
            if let Some(age) = age {
                options.switch.table.age = age.saturating_mul(1_000_000_000);
            }
            let tap = |name: &String| PortSpec { tap: true, ..PortSpec::new(name) };
            let specs = ports.iter().map(|name| PortSpec::new(name)).chain(taps.iter().map(tap)).collect();
            serve(options, source, specs)
        }
        NetCommand::Reload { switch } => {
            let done = control::ask(&folder(switch)?, &ControlRequest::Reload)?;
            let ReloadReport { added, changed, removed } = parsed(&done)?;
            let count = |what: &str, names: &[String]| match names {
                [] => String::new(),
                names => format!("; {what}: {}", printable(&names.join(", "))),
            };
            say(format_args!(
                "the file is in force{}{}{}",
                count("added", &added),
                count("changed", &changed),
                count("removed", &removed)
            ))
        }
        NetCommand::Add { switch, port } => {
            let path = control::ask(&folder(switch)?, &ControlRequest::Add { port: port.spec() })?;
            say(printable(path.as_str().unwrap_or_default()))
        }
        NetCommand::Remove { switch, port } => {
            control::ask(&folder(switch)?, &ControlRequest::Remove { name: port.clone() }).map(drop)
        }
        // A user without a folder for switches has no switches.
        NetCommand::List { json } if cli.folder.is_none() && control::default_folder().is_none() => list(&[], *json),
        NetCommand::List { json } => list(&control::switches(&all()?)?, *json),
        NetCommand::Show { switch, json } => show(&control::ask(&folder(switch)?, &ControlRequest::Show)?, *json),
        NetCommand::Table { switch, json } => {
            let folder = folder(switch)?;
            let addresses = control::ask(&folder, &ControlRequest::Table)?;
            if *json {
                return say(addresses);
            }
            show_table(&addresses, &report(&control::ask(&folder, &ControlRequest::Show)?)?)
        }
        NetCommand::Args { switch, port, card, libvirt } => {
            control::check_name(port)?;
            let path = PortSpec::new(port).socket(&folder(switch)?);
            let settings = card.settings();
            say(match libvirt {
                true => attach::libvirt(&path, settings),
                false => attach::arguments(switch, port, &path, settings),
            })
        }
        NetCommand::Attach { switch, port, card, qmp } => {
            let folder = folder(switch)?;
            let find = || -> Result<Option<PortReport>, VhostError> {
                let there = report(&control::ask(&folder, &ControlRequest::Show)?)?;
                Ok(there.ports.into_iter().find(|row| row.port.name == port.port))
            };
            let mut spec = port.spec();
            let mut mac = port.mac.first().copied();
            let there = find()?;
            let is_new = there.is_none();
            let user = machine_user(qmp)?;
            let mut remedy = "remove the port, and attach again without --owner".to_owned();
            match there {
                Some(row) => {
                    row.agrees(&spec)?;
                    mac = row.port.mac.first().copied();
                    if let Some(place) = &row.listed {
                        remedy = format!("set `owner` of the port in {place}, and reload");
                    }
                }
                None => {
                    // The rights of root need no owner.
                    spec.owner = spec.owner.or((user != 0).then_some(user));
                    control::ask(&folder, &ControlRequest::Add { port: spec.clone() })?;
                }
            }
            let socket = spec.socket(&folder);
            let is_taken = || Ok(find()?.is_some_and(|row| row.occupied));
            let plugged = check_access(&socket, user, &remedy)
                .and_then(|()| attach::plug(qmp, (switch, &port.port), &socket, mac, card.settings(), is_taken))
                .inspect_err(|_| {
                    if is_new {
                        let _ = control::ask(&folder, &ControlRequest::Remove { name: port.port.clone() });
                    }
                })?;
            say(format_args!("{} is {}", printable(&port.port), if plugged { "plugged in" } else { "in place" }))
        }
        NetCommand::Detach { switch, port, qmp } => {
            // Its switch may have ended.
            for name in [switch, port] {
                control::check_name(name)?;
            }
            let socket = PortSpec::new(port).socket(&folder(switch)?);
            match attach::unplug(qmp, (switch, port), &socket)? {
                true => say(format_args!("{} is unplugged", printable(port))),
                false => Err(VhostError::Refused(format!("the machine has no card on port {port} of {switch}"))),
            }
        }
    }
}

fn say(what: impl std::fmt::Display) -> Result<(), VhostError> {
    let _ = writeln!(std::io::stdout(), "{what}");
    Ok(())
}

/// Prints a text. A pager that closes early is no failure.
fn print(bytes: &[u8]) -> Result<(), VhostError> {
    let _ = std::io::stdout().write_all(bytes);
    Ok(())
}

fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy()).to_string()
}

fn check_file(source: &ConfigSource) -> Result<(), VhostError> {
    match (source.read()?, &source.path) {
        (Some(config), _) => {
            say(format_args!("{}: a good file; it lists {} ports", shown(&config.path), config.ports.len()))
        }
        (None, Some(path)) => Err(VhostError::Refused(format!(
            "there is no file {}: without it, the switch has the ports that commands add",
            shown(path)
        ))),
        (None, None) => {
            let why = "the switch has no file without --config, because its folder is not in /run/partywall/net";
            Err(VhostError::Refused(why.to_owned()))
        }
    }
}

fn serve(options: EngineOptions, source: ConfigSource, specs: Vec<PortSpec>) -> Result<(), VhostError> {
    let folder = options.folder.clone();
    let config = source.read()?;
    let private =
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o755).recursive(true).create(&folder);
    private.map_err(VhostError::file_error("make", &folder))?;
    // One process for a switch; the lock ends with the process.
    let lock = folder.join("lock");
    let file = rustix::fs::open(&lock, OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
        .map_err(|e| VhostError::file_error("open", &lock)(e.into()))?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(VhostError::Refused(format!("a switch runs in {} already", folder.display())));
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|source| VhostError::System { call: "catch signals", source })?;
    let (engine, handle) = Engine::new(options)?;
    let running = std::thread::spawn(move || engine.run());
    let switch = Arc::new(SwitchControl::new(&folder, handle.clone(), source));
    switch.start(config, &specs)?;
    let listener = control::listen(&folder)?;
    let asked = Arc::clone(&switch);
    std::thread::spawn(move || control::serve(&listener, &asked));
    say(format_args!("serving {}", folder.display()))?;
    // Without systemd, this does nothing.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    // An engine that ends by itself has failed.
    let watcher = signals.handle();
    let ended = std::thread::spawn(move || {
        let end = running.join();
        watcher.close();
        end
    });
    // A signal to end does not wait behind a file that is read slowly. One request that waits reads the newest file.
    let (reload, reloads) = std::sync::mpsc::sync_channel(1);
    let engine = handle.clone();
    std::thread::spawn(move || reloads.iter().for_each(|()| hang_up(&switch, &engine)));
    for signal in signals.forever() {
        if signal == SIGHUP {
            let _ = reload.try_send(());
            continue;
        }
        // Not behind a request that another thread performs.
        let _ = handle.ask(ControlRequest::Stop);
        break;
    }
    let _ = std::fs::remove_file(control::socket(&folder));
    match ended.join() {
        Ok(Ok(end)) => end,
        _ => Err(VhostError::Refused("the switch has ended by an internal fault".into())),
    }
}

/// SIGHUP has the file read again. It ends a switch without a file.
fn hang_up(switch: &SwitchControl, engine: &EngineHandle) {
    if !switch.has_file() {
        let _ = engine.ask(ControlRequest::Stop);
    } else if let Err(e) = switch.perform(ControlRequest::Reload) {
        tracing::error!("SIGHUP: {e}");
    }
}

fn report(value: &serde_json::Value) -> Result<SwitchReport, VhostError> {
    parsed(value)
}

fn parsed<T: serde::de::DeserializeOwned>(value: &serde_json::Value) -> Result<T, VhostError> {
    serde_json::from_value(value.clone()).map_err(|e| VhostError::Refused(format!("the switch answers otherwise: {e}")))
}

fn list(switches: &[FoundSwitch], json: bool) -> Result<(), VhostError> {
    if json {
        return say(serde_json::json!(switches));
    }
    if switches.is_empty() {
        return say("no switch runs");
    }
    let mut shown = table(&["SWITCH", "STATE", "FOLDER"]);
    for row in switches {
        let state = if row.running { "running" } else { "killed" };
        shown.add_row([&row.name, state, &*printable(&row.folder.to_string_lossy()).to_string()]);
    }
    say(shown)
}

fn show(value: &serde_json::Value, json: bool) -> Result<(), VhostError> {
    if json {
        return say(value);
    }
    let mut shown =
        table(&["PORT", "STATE", ">OUT", ">SENT", ">IN", ">RECEIVED", ">NO BUFFERS", ">REFUSED", ">ERRORS"]);
    for row in report(value)?.ports {
        let c = row.counters;
        let state = match (row.port.tap, row.connected, row.occupied) {
            (true, true, _) => "uplink",
            (true, false, _) => "no device",
            (false, true, _) => "up",
            (false, false, true) => "no driver",
            (false, false, false) => "no machine",
        };
        let refused = c.spoofed + c.flood_limited + c.malformed;
        let carried = [c.sent.to_string(), bytes(c.sent_bytes), c.received.to_string(), bytes(c.received_bytes)];
        let lost = [c.no_buffers, refused, c.broken].map(|n| n.to_string());
        shown.add_row([row.port.name, state.to_owned()].into_iter().chain(carried).chain(lost));
    }
    say(shown)
}

fn show_table(addresses: &serde_json::Value, switch: &SwitchReport) -> Result<(), VhostError> {
    let mut shown = table(&["ADDRESS", "PORT", ">IDLE"]);
    for row in addresses.as_array().into_iter().flatten() {
        let port = switch.ports.iter().find(|port| row["port"] == port.number).map_or("", |port| &port.port.name);
        let idle = row["idle"].as_u64().map_or("fixed".to_owned(), |seconds| format!("{seconds}s"));
        shown.add_row([row["mac"].as_str().unwrap_or_default(), port, &idle]);
    }
    say(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_and_mtu_out_of_range_are_refused() {
        for command in ["net args lan a", "net attach lan a --qmp q"] {
            let parse = |words: &str| Cli::try_parse_from(command.split(' ').chain(words.split(' ')));
            for words in ["--queues 1", "--queues 4", "--mtu 68", "--mtu 65535 --queues 2"] {
                assert!(parse(words).is_ok(), "{command} {words}");
            }
            for (words, range) in [
                ("--queues 0", "1 to 4"),
                ("--queues 5", "1 to 4"),
                ("--mtu 67", "68 to 65535"),
                ("--mtu 65536", "68 to 65535"),
            ] {
                let refused = parse(words).unwrap_err().to_string();
                assert!(refused.contains(&format!("from {range}")), "{refused}");
            }
        }
    }
}
