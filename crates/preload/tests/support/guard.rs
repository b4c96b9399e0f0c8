//! Children that do not outlive their test.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus, Output},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};

use super::LONGEST;
use super::collect::collect;
use super::stage::listens;

/// A child with its descendants: they are a process group, which ends with this value.
pub(crate) struct Guard(pub(crate) Child);

impl Guard {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self(command.process_group(0).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}")))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }

    /// Its end; a test whose child hangs fails.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.wait_for(LONGEST).unwrap_or_else(|| panic!("process {} does not end", self.0.id()))
    }

    /// Its end, if it comes in time.
    pub(crate) fn wait_for(&mut self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            let status = self.0.try_wait().unwrap();
            if status.is_some() || Instant::now() > deadline {
                return status;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its end, with everything that it says on piped outputs.
    pub(crate) fn output(mut self) -> Output {
        let [stdout, stderr] = collect(&mut self.0);
        let status = self.wait();
        // Its descendants may hold the pipes open.
        self.signal_all(Signal::KILL);
        Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    }

    /// Waits until it, or a descendant, listens on this port. The test fails if it ends before, with its `log`, and if it hangs, with the
    /// places where its threads are.
    pub(crate) fn await_listener(&mut self, port: u16, log: &dyn Fn() -> String) {
        let deadline = Instant::now() + LONGEST;
        while !listens(self.id(), port) {
            if let Some(status) = self.ended() {
                panic!("the server ended before it listened on {port}, with {status}: {}", log());
            }
            assert!(
                Instant::now() < deadline,
                "the server does not listen on {port}:\n{}\n{}",
                self.whereabouts(),
                log()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// What the kernel says of its threads: their states, their calls, and their places in the kernel.
    fn whereabouts(&self) -> String {
        let threads = fs::read_dir(format!("/proc/{}/task", self.id())).unwrap();
        let of_thread = |thread: fs::DirEntry| {
            let told = ["status", "syscall", "wchan", "stack"].map(|file| {
                let text = fs::read_to_string(thread.path().join(file)).unwrap_or_else(|e| e.to_string());
                let most = if file == "status" { 3 } else { usize::MAX };
                text.lines().take(most).map(|line| format!("  {line}\n")).collect::<String>()
            });
            format!("{}\n{}", thread.path().display(), told.concat())
        };
        threads.flatten().map(of_thread).collect()
    }

    /// A signal for it alone.
    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended.
        let _ = rustix::process::kill_process(self.pid(), signal);
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed()).unwrap()
    }

    /// A signal for it and its descendants.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let _ = kill_process_group(self.pid(), signal);
    }

    /// As an administrator would end it: asks, and insists only after a while.
    pub(crate) fn stop(&mut self) {
        self.signal(Signal::TERM);
        if self.wait_for(Duration::from_secs(10)).is_none() {
            self.signal_all(Signal::KILL);
            self.wait();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Ended already is fine.
        self.signal_all(Signal::KILL);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
