//! Runs in a guest of the lab, and there runs commands and moves files for it.
//!
//! With arguments, it is an end of a stream: `partywall-lab-guest receive PORT`, `partywall-lab-guest send ADDRESS:PORT RATE STOP-FILE`.
#![allow(clippy::print_stderr, reason = "its standard error is the guest's console")]

use partywall_lab::migration::traffic;
use partywall_lab::wire::{self, CommandFrame, FrameKind, FrameReader, MAX, WireItem};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The way to the lab, shared by all that have something to say.
#[derive(Clone)]
struct LabPort(Arc<Mutex<File>>);

impl LabPort {
    fn say(&self, id: u32, kind: FrameKind, payload: &[u8]) {
        let mut port = locked(&self.0);
        // When the lab is gone, so will be this guest.
        let _ = wire::write(&mut *port, id, kind, payload);
    }
}

/// The guest sees the end of the stream while the port has no client; one will connect.
struct Patient(File);

impl Read for Patient {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buf)? {
                0 => thread::sleep(Duration::from_millis(20)),
                n => return Ok(n),
            }
        }
    }
}

/// Where the input of commands and the content of files go, by their numbers.
type Sinks = Arc<Mutex<HashMap<u32, Sink>>>;

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Sink {
    Stdin(ChildStdin),
    File(File),
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match do_as_told(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("partywall-lab-guest: {e}");
            ExitCode::FAILURE
        }
    }
}

fn do_as_told(words: &[&str]) -> io::Result<()> {
    let number = |_| io::Error::other("write a number");
    match words {
        [] => serve(),
        ["receive", port] => traffic::receive(port.parse().map_err(number)?, &mut io::stdout().lock()),
        ["send", to, rate, stop] => {
            traffic::send(to, rate.parse().map_err(number)?, Path::new(stop), &mut io::stdout().lock())
        }
        _ => Err(io::Error::other("usage: [receive PORT | send ADDRESS:PORT RATE STOP-FILE]")),
    }
}

fn serve() -> io::Result<()> {
    let path = find_port()?;
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let port = LabPort(Arc::new(Mutex::new(file.try_clone()?)));
    locked(&port.0).write_all(&wire::greeting())?;
    let (mut stream, mut reader) = (Patient(file), FrameReader::default());
    let sinks = Sinks::default();
    let running: Arc<Mutex<HashMap<u32, u32>>> = Arc::default();
    while let Some(item) = reader.next(&mut stream)? {
        let WireItem::Frame(CommandFrame { id, kind, payload }) = item else { continue };
        let done = match kind {
            FrameKind::Run => run(&port, &running, &sinks, id, &payload),
            FrameKind::Input => input(&port, &sinks, id, &payload),
            FrameKind::Signal => {
                let pids = locked(&running);
                match (pids.get(&id), payload.try_into().map(i32::from_le_bytes)) {
                    (Some(&pid), Ok(signal)) => send_signal(pid, signal),
                    // It has ended by itself meanwhile.
                    _ => Ok(()),
                }
            }
            FrameKind::Put => put(&payload).map(|file| {
                locked(&sinks).insert(id, Sink::File(file));
            }),
            FrameKind::Get => get(&port, id, &payload),
            _ => Err(io::Error::other("not for a guest")),
        };
        if let Err(e) = done {
            port.say(id, FrameKind::Failed, e.to_string().as_bytes());
        }
    }
    Ok(())
}

fn find_port() -> io::Result<PathBuf> {
    // Its driver may still be at work.
    for _ in 0..500 {
        if let Ok(path) = partywall_region::relay::find_port(wire::PORT) {
            return Ok(path);
        }
        thread::sleep(Duration::from_millis(10));
    }
    partywall_region::relay::find_port(wire::PORT)
}

fn run(
    port: &LabPort,
    running: &Arc<Mutex<HashMap<u32, u32>>>,
    sinks: &Sinks,
    id: u32,
    payload: &[u8],
) -> io::Result<()> {
    let mut words = payload.split_inclusive(|b| *b == 0).map(|word| OsStr::from_bytes(&word[..word.len() - 1]));
    let program = words.next().ok_or_else(|| io::Error::other("no command"))?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Signals are for it and for what it has started.
        .process_group(0)
        .spawn()
        .map_err(|e| io::Error::other(format!("cannot run {}: {e}", program.to_string_lossy())))?;
    let lost = || io::Error::other("a child without pipes");
    let stdin = child.stdin.take().ok_or_else(lost)?;
    let out = pump(port.clone(), id, FrameKind::Stdout, child.stdout.take().ok_or_else(lost)?);
    let err = pump(port.clone(), id, FrameKind::Stderr, child.stderr.take().ok_or_else(lost)?);
    locked(running).insert(id, child.id());
    locked(sinks).insert(id, Sink::Stdin(stdin));
    let (port, running, sinks) = (port.clone(), Arc::clone(running), Arc::clone(sinks));
    thread::spawn(move || {
        // Processes that the command leaves behind also hold the pipes. Their output is not waited for.
        let status = wait(&mut child);
        locked(&running).remove(&id);
        // A command that has ended reads no input, whether or not the lab has ended that.
        locked(&sinks).remove(&id);
        for _ in 0..500 {
            if out.is_finished() && err.is_finished() {
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
        port.say(id, FrameKind::Exited, &status.to_le_bytes());
    });
    Ok(())
}

fn wait(child: &mut Child) -> i32 {
    match child.wait() {
        Ok(status) => status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)),
        Err(_) => -1,
    }
}

fn pump(port: LabPort, id: u32, kind: FrameKind, mut from: impl Read + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut buf = vec![0; MAX];
        while let Ok(n @ 1..) = from.read(&mut buf) {
            port.say(id, kind, &buf[..n]);
        }
    })
}

fn input(port: &LabPort, sinks: &Sinks, id: u32, payload: &[u8]) -> io::Result<()> {
    let mut sinks = locked(sinks);
    let written = match sinks.get_mut(&id) {
        // A program that does not read its input is not at fault.
        Some(Sink::Stdin(stdin)) => stdin.write_all(payload).or(Ok(())),
        Some(Sink::File(file)) => file.write_all(payload),
        None => return Ok(()),
    };
    if (payload.is_empty() || written.is_err())
        && let Some(Sink::File(_)) = sinks.remove(&id)
        && written.is_ok()
    {
        port.say(id, FrameKind::Done, &[]);
    }
    written
}

fn put(payload: &[u8]) -> io::Result<File> {
    let (mode, path) = payload.split_first_chunk().ok_or_else(|| io::Error::other("no path"))?;
    let path = std::path::Path::new(OsStr::from_bytes(path));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = File::create(path)?;
    file.set_permissions(fs::Permissions::from_mode(u32::from_le_bytes(*mode)))?;
    Ok(file)
}

fn get(port: &LabPort, id: u32, payload: &[u8]) -> io::Result<()> {
    let mut file = File::open(OsStr::from_bytes(payload))?;
    let mut buf = vec![0; MAX];
    loop {
        match file.read(&mut buf)? {
            0 => break,
            n => port.say(id, FrameKind::Data, &buf[..n]),
        }
    }
    port.say(id, FrameKind::Done, &[]);
    Ok(())
}

fn send_signal(pid: u32, signal: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let signal = rustix::process::Signal::from_named_raw(signal);
    match (pid, signal) {
        (Some(pid), Some(signal)) => match rustix::process::kill_process_group(pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        },
        _ => Err(io::Error::other("no such signal")),
    }
}
