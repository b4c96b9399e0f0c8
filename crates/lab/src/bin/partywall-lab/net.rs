//! Two stock machines without Partywall inside: a TCP stream between them over the switch of `partywall net`, beside the same stream over
//! tap and bridge.

use crate::demo::{UNAVAILABLE, is_of_the_host};
use crate::left::Left;
use crate::stop;
use indicatif::DecimalBytes;
use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab, LabError, NetSwitch, Network};
use partywall_terminal::{Show, table};
use serde_json::Value;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Longer is a hang, even on a busy machine that emulates.
const LONGEST: Duration = Duration::from_secs(90);
/// A machine's memory, in MiB.
const MEMORY: u32 = 256;
/// The names of the machines, the Ethernet addresses of their cards on the switch, and their addresses there.
const MACHINES: [(&str, &str, &str); 2] =
    [("a", "52:54:00:99:00:01", "10.99.0.1"), ("b", "52:54:00:99:00:02", "10.99.0.2")];
/// The port of iperf3.
const PORT: u16 = 5201;
const IPERF: &str = "/usr/bin/iperf3";

/// Carries TCP between two machines without Partywall inside: over the switch of `partywall net`, and over tap and bridge.
///
/// The machines have Debian's kernel, busybox, and the program of the lab that runs commands in them. Each has two virtio-net cards, one
/// on the switch and one on a tap of a Linux bridge. The stream is that of iperf3 if this host has it, else that of busybox's nc.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Measure each so often and show the median, 1 to 99 [default: 3, with --quick 1]
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<u32>(1..=99))]
    rounds: Option<u32>,

    /// One short round
    #[arg(long)]
    quick: bool,
}

impl Args {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }
}

/// An ordinary program that sends a TCP stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TcpProgram {
    /// For this number of seconds.
    Iperf { seconds: u32 },
    /// This number of MiB.
    Nc { mib: u32 },
}

impl TcpProgram {
    /// The commands of the receiver, and of the sender to an address.
    fn commands(self, address: &str) -> [String; 2] {
        match self {
            Self::Iperf { seconds } => ["iperf3 -s -1".to_owned(), format!("iperf3 -c {address} -t {seconds} --json")],
            Self::Nc { mib } => [
                format!("nc -l -p {PORT} > /dev/null"),
                format!("dd if=/dev/zero bs=64k count={} 2> /dev/null | nc {address} {PORT}", mib * 16),
            ],
        }
    }

    /// Bytes a second, from the output of the sender and the time that it ran.
    fn rate(self, said: &str, took: Duration) -> Option<f64> {
        match self {
            Self::Iperf { .. } => {
                let report: Value = serde_json::from_str(said).ok()?;
                report["end"]["sum_received"]["bits_per_second"].as_f64().map(|bits| bits / 8.0)
            }
            Self::Nc { mib } => Some(f64::from(mib) * f64::from(1 << 20) / took.as_secs_f64()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Iperf { .. } => "iperf3, one stream",
            Self::Nc { .. } => "nc, one stream",
        }
    }
}

/// Two machines, the switch and the bridge.
struct PlainMachines {
    // Machines go first: the switch is to see them end.
    guests: Vec<Guest>,
    switch: NetSwitch,
    network: Network,
    lab: Lab,
}

/// Bytes a second of each round.
#[derive(Debug)]
struct NetFigures {
    program: TcpProgram,
    bridge_name: String,
    emulated: bool,
    switch: Vec<f64>,
    bridge: Vec<f64>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let _stop = stop::on_signals()?;
    let show = Show::new();
    show.step("Two virtual machines without Partywall inside");
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        show.say("   left out: the bridge to compare with needs root and /dev/net/tun");
        return Ok(UNAVAILABLE.into());
    }
    let machines = match PlainMachines::boot(&show) {
        Ok(machines) => machines,
        // Tools and packages are this host's; whatever a machine does wrong is not.
        Err(e) if !partywall_lab::interrupted() && is_of_the_host(e.as_ref()) => {
            show.quiet();
            show.say(&format!("   left out: {e}"));
            return Ok(UNAVAILABLE.into());
        }
        Err(e) => return Err(e),
    };
    let left = Left::new(&machines.guests, machines.switch.pid(), machines.switch.socket(MACHINES[0].0));
    let result = machines.measure(args, &show);
    show.busy("taking both machines down");
    drop(machines);
    show.quiet();
    let figures = result?;
    show.say(&format!(
        "\nResults between two virtual machines without Partywall inside (medians of {} round(s))\n",
        args.rounds()
    ));
    show.say(&figures.to_text());
    left.check()?;
    show.say("Checked: no machine, switch, network, process or file of this part is left.");
    Ok(ExitCode::SUCCESS)
}

impl PlainMachines {
    fn boot(show: &Show) -> Result<Self, Box<dyn Error>> {
        show.busy("kernel and file system (the first time, Debian's kernel package is fetched)");
        partywall_lab::check_tools()?;
        let mut image = ImageOptions::default();
        if Path::new(IPERF).exists() {
            image = image.program(IPERF, "iperf3");
        }
        let lab = Lab::new("demo-net", &image)?;
        let network = Network::bridge()?;
        show.command("", "partywall net run lan --port a --port b");
        let switch = NetSwitch::start(&MACHINES.map(|(name, ..)| name))?;
        show.busy("both boot");
        let boot = |(name, mac, address): (&str, &str, &str)| -> Result<Guest, LabError> {
            // Without room for windows, as any machine.
            let options = GuestOptions::new(name).memory(MEMORY).shared_memory().slots(0).network(&network)?;
            let guest = lab.boot(options.arguments(switch.card(name, mac)))?;
            guest.shell(&format!("ip address add {address}/24 dev eth1 && ip link set eth1 up"))?;
            Ok(guest)
        };
        let guests = std::thread::scope(|s| {
            let booting = MACHINES.map(|machine| s.spawn(move || boot(machine)));
            booting.into_iter().map(|guest| guest.join().map_err(|_| "a thread has panicked")).collect::<Vec<_>>()
        });
        let guests = guests.into_iter().map(|guest| Ok(guest??)).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        for guest in &guests {
            show.say(&format!(
                "   {}: Debian's kernel {}, {}, up in {:.1} s; inside is nothing of ours but the helper that runs its commands",
                guest.name(),
                lab.image().version,
                lab.accel(),
                guest.booted_in().as_secs_f64()
            ));
        }
        Ok(Self { guests, switch, network, lab })
    }

    fn measure(&self, args: &Args, show: &Show) -> Result<NetFigures, Box<dyn Error>> {
        let [a, b] = &self.guests[..] else { return Err("there are not two machines".into()) };
        let program = match (Path::new(IPERF).exists(), args.quick) {
            (true, quick) => TcpProgram::Iperf { seconds: if quick { 1 } else { 3 } },
            (false, quick) => TcpProgram::Nc { mib: if quick { 16 } else { 128 } },
        };
        let on_switch = MACHINES[1].2.to_owned();
        let on_bridge = b.address().ok_or("b has no address")?.to_string();
        for address in [&on_switch, &on_bridge] {
            wait_reachable(a, address)?;
        }
        let mut figures = NetFigures {
            program,
            bridge_name: self.network.kind().to_string(),
            emulated: self.lab.accel() == partywall_lab::Accel::Tcg,
            switch: Vec::new(),
            bridge: Vec::new(),
        };
        for round in 1..=args.rounds() {
            show.show_commands(round == 1);
            for (rates, address, way) in
                [(&mut figures.switch, &on_switch, "switch"), (&mut figures.bridge, &on_bridge, "tap and bridge")]
            {
                show.busy(&format!("TCP over {way}, round {round} of {}", args.rounds()));
                rates.push(stream(show, a, b, program, address)?);
            }
        }
        Ok(figures)
    }
}

/// Waits until a machine answers: its card may come up a moment after it.
fn wait_reachable(from: &Guest, address: &str) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + LONGEST;
    while from.run(&["ping", "-c", "1", "-W", "1", address])?.status != 0 {
        if Instant::now() > deadline {
            return Err(format!("{address} does not answer {}", from.name()).into());
        }
    }
    Ok(())
}

/// Sends one stream from a to b. Returns bytes a second.
fn stream(show: &Show, a: &Guest, b: &Guest, program: TcpProgram, address: &str) -> Result<f64, Box<dyn Error>> {
    let [receive, send] = program.commands(address);
    show.command(b.name(), &receive);
    let receiver = b.start(&["sh", "-c", &format!("exec {receive}")])?;
    // In the kernel's table, a listening socket has the state 0A.
    b.shell(&format!(
        "while ! grep -qE ':{PORT:04X} [0-9A-F]+:0000 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done"
    ))?;
    show.command(a.name(), &send);
    let begun = Instant::now();
    let said = a.shell(&send)?;
    let received = receiver.wait(LONGEST)?;
    let took = begun.elapsed();
    if received.status != 0 {
        return Err(format!("`{receive}` in b ended with {}: {}", received.status, received.text()).into());
    }
    program.rate(&said, took).ok_or_else(|| format!("`{send}` reports no rate: {said}").into())
}

impl NetFigures {
    fn to_text(&self) -> String {
        let rate = |bytes: f64| format!("{}/s", DecimalBytes(bytes as u64));
        let (switch, bridge) = (median(&self.switch), median(&self.bridge));
        let mut rows = table(&[self.program.name(), ">rate", ">slowest", ">fastest"]);
        let ours = "switch of `partywall net`, virtio-net";
        for (name, rates, middle) in [(ours, &self.switch, switch), (&self.bridge_name, &self.bridge, bridge)] {
            let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
            let fastest = rates.iter().copied().fold(0.0, f64::max);
            rows.add_row([name.to_owned(), rate(middle), rate(slowest), rate(fastest)]);
        }
        let mut text = format!("{rows}\nThe switch is {:.2} times as fast as tap and bridge", switch / bridge);
        if self.emulated {
            text.push_str(
                "\nThese machines are emulated: their processors limit both streams, so the ratio says little about real ones.",
            );
        }
        text
    }
}

fn median(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_iperf_is_read_from_its_receiver() {
        let program = TcpProgram::Iperf { seconds: 1 };
        let said = r#"{"end": {"sum_sent": {"bits_per_second": 9e9}, "sum_received": {"bits_per_second": 8e9}}}"#;
        assert_eq!(program.rate(said, Duration::from_secs(7)), Some(1e9));
        assert_eq!(program.rate("iperf3: error - unable to connect", Duration::from_secs(7)), None);
    }

    #[test]
    fn rate_of_nc_is_its_size_by_its_time() {
        assert_eq!(TcpProgram::Nc { mib: 4 }.rate("", Duration::from_secs(2)), Some(2.0 * 1024.0 * 1024.0));
    }

    #[test]
    fn table_shows_a_loss_as_a_ratio_below_one() {
        let mut figures = NetFigures {
            program: TcpProgram::Iperf { seconds: 1 },
            bridge_name: "tap and bridge".into(),
            emulated: false,
            switch: vec![50e6, 10e6, 90e6],
            bridge: vec![200e6, 100e6, 80e6],
        };
        let text = figures.to_text();
        for part in ["iperf3", "50.00 MB/s", "100.00 MB/s", "The switch is 0.50 times as fast as tap and bridge"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("emulated"), "{text}");
        figures.emulated = true;
        assert!(figures.to_text().contains("emulated"));
    }
}
