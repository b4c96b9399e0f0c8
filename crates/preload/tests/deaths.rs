//! The results at one end of a connection after the other has gone, for every kind of death, with unread bytes at either end, and in
//! every order of calls: the same with the library as by TCP. The cases are those of `driver/deaths.c`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
};

use partywall_protocol::environment;
use support::{
    c,
    world::{World, library},
};

/// Cases that run beside each other: most of their time they wait.
const BESIDE: u32 = 4;
/// One of this number of cases runs with the tests. With a smaller stride more processes run, each as long.
const USUAL: u32 = 7;

fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| c::program("deaths", &["deaths.c"], &[]))
}

/// Runs every `stride`th case, and gives a line for each, and how many of them went by rings.
fn run(stride: u32, only: Option<&str>, with: &(dyn Fn(&mut Command) + Sync)) -> (Vec<String>, u32) {
    let step = stride.max(USUAL) * BESIDE;
    let part = |first: u32| {
        let mut command = Command::new(driver());
        command.args([step.to_string(), first.to_string()]).args(only).env_remove(environment::PRELOAD);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        with(&mut command);
        let output = support::guard::Guard::spawn(&mut command).output();
        assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let firsts: Vec<u32> = (0..if only.is_some() { 1 } else { step }).step_by(stride as usize).collect();
    let parts: Vec<String> = thread::scope(|scope| {
        let part = &part;
        let some = |firsts: Vec<u32>| scope.spawn(move || firsts.into_iter().map(part).collect::<Vec<_>>());
        let size = firsts.len().div_ceil(BESIDE as usize);
        let threads: Vec<_> = firsts.chunks(size).map(|firsts| some(firsts.to_vec())).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let lines = parts.iter().flat_map(|part| part.lines());
    let (sums, cases): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('#'));
    let by_ring = sums.iter().map(|sum| sum.split(' ').nth(1).unwrap().parse::<u32>().unwrap()).sum();
    (cases.into_iter().map(str::to_owned).collect(), by_ring)
}

/// With the library, and a world whose broker has this socket.
fn preload(socket: &Path) -> impl Fn(&mut Command) + Sync {
    move |command: &mut Command| {
        command.env(environment::PRELOAD, library()).env(environment::BROKER, socket);
        command.env(environment::MOVES, "now");
    }
}

#[test]
fn dead_peer_looks_as_by_tcp_in_every_order_of_calls() {
    let stride = std::env::var("PARTYWALL_DEATHS_STRIDE").ok().and_then(|text| text.parse().ok()).unwrap_or(USUAL);
    let world = World::new();
    // Threads share the path, and not the world.
    let socket = world.socket();
    let preload = preload(&socket);
    let (plain, none) = run(stride, None, &|_| {});
    let (loaded, by_ring) = run(stride, None, &preload);
    assert_eq!(none, 0, "without the library nothing goes by rings");
    assert_eq!(plain.len(), loaded.len());
    // In three of the six kinds of unread data, the bytes lie in a ring.
    assert!(by_ring as usize > plain.len() / 4, "only {by_ring} of {} cases went by rings", plain.len());
    let mut report = String::new();
    for (plain, loaded) in plain.iter().zip(&loaded).filter(|(plain, loaded)| plain != loaded) {
        let number = plain.split(' ').next();
        // On a busy machine a pause may be too short, by TCP as well. Only a difference in every run counts.
        let again = |with: &(dyn Fn(&mut Command) + Sync)| run(1, number, with).0.concat();
        if (0..12).all(|_| again(&preload) != again(&|_| {})) {
            report += &format!("plain   {plain}\nlibrary {loaded}\n");
        }
    }
    assert!(report.is_empty(), "what the survivor sees differs:\n{report}");
}

/// On one core the sender that the closing peer wakes runs before the peer's kernel has reset the connection.
#[test]
fn sender_asleep_when_its_peer_closes_is_reset_as_by_tcp() {
    let world = World::new();
    let socket = world.socket();
    for case in ["close:S", "reset:D"] {
        // On a busy machine the kernel may still take bytes when it has said that it takes no more, and a connection may have no ring yet. In
        // either case the sender does not sleep, so such runs do not count.
        let slept = |(lines, _): &(Vec<String>, u32)| lines[0].contains(&format!("{}:-104", &case[case.len() - 1..]));
        let plain = (0..500).map(|_| run(1, Some(case), &|_| {})).find(slept);
        let (plain, _) = plain.unwrap_or_else(|| panic!("no sender of {case} sleeps by TCP"));
        assert_eq!(plain.len(), 1);
        let rounds = (0..500).map(|_| run(1, Some(case), &preload(&socket))).filter(|(_, by_ring)| *by_ring > 0);
        let rounds: Vec<_> = rounds.take(20).map(|(lines, _)| lines).collect();
        assert_eq!(rounds, vec![plain; 20], "{case}");
    }
}
