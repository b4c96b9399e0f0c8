//! Workloads of mail, web and file servers, as filebench's personalities of these names define them, and reading of large files.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::set::{FileSet, Random, SetShape};
use crate::{
    apps::accounts::Accounts,
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    report::metric::Metric,
    task::Figures,
};

/// Bytes of one read or write.
const UNIT: usize = 1 << 20;
/// Most bytes that are appended.
const APPENDED: u64 = 16 << 10;
/// Bytes of all large files together.
const LARGE: u64 = 512 << 20;
const LARGE_FILES: u64 = 8;

/// A server's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Personality {
    /// A mail server: 16 threads delete, create, append and read small files of one folder, with `fsync`.
    Mail,
    /// A web server: 100 threads read ten small files, and append to a log.
    Web,
    /// A file server: 50 threads create, append, read, delete and stat larger files.
    File,
    /// One thread reads large files from beginning to end, each once.
    Large,
}

impl Personality {
    /// All of them, in the order of tables.
    pub(crate) const ALL: [Self; 4] = [Self::Mail, Self::Web, Self::File, Self::Large];

    /// The name in tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mail => "mail",
            Self::Web => "web",
            Self::File => "file",
            Self::Large => "large-read",
        }
    }

    fn threads(self) -> u64 {
        match self {
            Self::Mail => 16,
            Self::Web => 100,
            Self::File => 50,
            Self::Large => 1,
        }
    }

    /// The set of files, with the number of files divided.
    pub(crate) fn shape(self, divide: u32) -> SetShape {
        let shape = |files: u32, mean: u64, width: u32, present: u32| SetShape {
            // Each thread has a file, and there are others.
            files: (files / divide.max(1)).max(2 * self.threads() as u32),
            mean,
            width,
            present,
        };
        match self {
            Self::Mail => shape(1_000, 16 << 10, 1_000_000, 80),
            Self::Web => shape(1_000, 16 << 10, 20, 100),
            Self::File => shape(10_000, 128 << 10, 20, 80),
            Self::Large => SetShape { files: 1, mean: 1, width: 20, present: 0 },
        }
    }
}

/// A step of a workload whose folder is in a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FilesStep {
    /// Make the files.
    Make,
    /// Use them, and measure.
    Use,
    /// Remove them.
    Remove,
}

/// The order to the program in a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilesOrder {
    pub(crate) step: FilesStep,
    pub(crate) work: FileWork,
    /// The folder as this machine has it.
    pub(crate) folder: PathBuf,
}

impl FilesOrder {
    /// Does the step. Only the use of the files has figures.
    pub(crate) fn execute(&self, processors: usize, interrupt: &Interrupt) -> Result<Figures> {
        match self.step {
            FilesStep::Make => self.work.make(&self.folder).map(|()| Figures::new()),
            FilesStep::Use => self.work.use_files(&self.folder, processors, interrupt),
            FilesStep::Remove => FileWork::remove(&self.folder).map(|()| Figures::new()),
        }
    }
}

/// One workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileWork {
    pub(crate) personality: Personality,
    /// The number of files is divided by this.
    pub(crate) divide: u32,
    pub(crate) time: Duration,
}

/// The folder of a workload, as the server's host has it and as the client sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folders<'a> {
    pub(crate) server: &'a Path,
    pub(crate) client: &'a Path,
}

/// The account of one thread.
#[derive(Debug)]
struct ThreadLog {
    times: Histogram<u64>,
    bytes: u64,
    last: Instant,
}

impl ThreadLog {
    fn new() -> Result<Self> {
        let times =
            Histogram::new_with_max(60_000_000_000, 3).map_err(|e| BenchError::transport("making a histogram", e))?;
        Ok(Self { times, bytes: 0, last: Instant::now() })
    }

    /// An operation has ended.
    fn note(&mut self, bytes: u64) {
        let now = Instant::now();
        self.times.saturating_record(now.duration_since(self.last).as_nanos() as u64);
        self.bytes += bytes;
        self.last = now;
    }

    /// What was since the last operation does not count.
    fn skip(&mut self) {
        self.last = Instant::now();
    }
}

/// One thread of a workload.
struct WorkloadThread<'a> {
    set: &'a FileSet,
    log_file: &'a Path,
    random: Random,
    buffer: Vec<u8>,
    log: ThreadLog,
}

impl WorkloadThread<'_> {
    /// One round of a server.
    fn round(&mut self, personality: Personality) -> Result<()> {
        match personality {
            Personality::Mail => {
                self.delete()?;
                self.create(true, APPENDED)?;
                self.append(true, true)?;
                self.read()
            }
            Personality::Web => {
                for _ in 0..10 {
                    self.read()?;
                }
                self.append_log()
            }
            Personality::File => {
                let size = self.random.size(128 << 10);
                self.create(false, size)?;
                self.append(false, false)?;
                self.read()?;
                self.delete()?;
                self.stat()
            }
            Personality::Large => Ok(()),
        }
    }

    /// Does something with a file that is there, and gives it back.
    fn with_present(&mut self, then: impl FnOnce(&mut Self, &Path) -> Result<u64>) -> Result<()> {
        let Some(file) = self.set.take_present(&mut self.random) else { return Ok(()) };
        let path = self.set.path(file);
        self.log.skip();
        let done = then(self, &path);
        self.set.put_present(file);
        self.log.note(done?);
        Ok(())
    }

    fn delete(&mut self) -> Result<()> {
        let Some(file) = self.set.take_present(&mut self.random) else { return Ok(()) };
        let path = self.set.path(file);
        self.log.skip();
        fs::remove_file(&path).during(format!("deleting {}", path.display()))?;
        self.log.note(0);
        self.set.put_absent(file);
        Ok(())
    }

    /// Creates a file of this size; a mail server's has a random one below it.
    fn create(&mut self, syncs: bool, size: u64) -> Result<()> {
        let Some(file) = self.set.take_absent(&mut self.random) else { return Ok(()) };
        let size = if syncs { 1 + self.random.below(size) } else { size };
        let path = self.set.path(file);
        self.log.skip();
        let open = OpenOptions::new().write(true).create(true).truncate(true).open(&path);
        let mut open = open.during(format!("creating {}", path.display()))?;
        let mut left = size as usize;
        while left > 0 {
            let n = left.min(UNIT);
            open.write_all(&self.buffer[..n]).during(format!("writing {}", path.display()))?;
            left -= n;
        }
        finish(open, syncs, &path)?;
        self.log.note(size);
        self.set.put_present(file);
        Ok(())
    }

    /// Appends to a file, after it has been read if so asked.
    fn append(&mut self, reads: bool, syncs: bool) -> Result<()> {
        let size = 1 + self.random.below(APPENDED);
        self.with_present(|worker, path| {
            let open = OpenOptions::new().read(reads).append(true).open(path);
            let mut open = open.during(format!("opening {}", path.display()))?;
            let read = if reads { read_all(&mut open, &mut worker.buffer, path)? } else { 0 };
            open.write_all(&worker.buffer[..size as usize]).during(format!("appending to {}", path.display()))?;
            finish(open, syncs, path)?;
            Ok(read + size)
        })
    }

    fn append_log(&mut self) -> Result<()> {
        let size = 1 + self.random.below(APPENDED);
        self.log.skip();
        let open = OpenOptions::new().append(true).create(true).open(self.log_file);
        let mut open = open.during(format!("opening {}", self.log_file.display()))?;
        open.write_all(&self.buffer[..size as usize]).during(format!("appending to {}", self.log_file.display()))?;
        self.log.note(size);
        Ok(())
    }

    fn read(&mut self) -> Result<()> {
        self.with_present(|worker, path| {
            let mut open = File::open(path).during(format!("opening {}", path.display()))?;
            read_all(&mut open, &mut worker.buffer, path)
        })
    }

    fn stat(&mut self) -> Result<()> {
        self.with_present(|_, path| fs::metadata(path).map(|_| 0).during(format!("asking about {}", path.display())))
    }
}

fn read_all(open: &mut File, buffer: &mut [u8], path: &Path) -> Result<u64> {
    let mut read = 0;
    loop {
        match open.read(buffer).during(format!("reading {}", path.display()))? {
            0 => return Ok(read),
            n => read += n as u64,
        }
    }
}

fn finish(open: File, syncs: bool, path: &Path) -> Result<()> {
    if syncs { open.sync_all().during(format!("syncing {}", path.display())) } else { Ok(()) }
}

impl FileWork {
    /// Makes the files, uses them by the client's folder, and removes them.
    pub(crate) fn run(&self, folders: Folders<'_>, processors: usize, interrupt: &Interrupt) -> Result<Figures> {
        self.make(folders.server)?;
        let figures = self.use_files(folders.client, processors, interrupt);
        let removed = Self::remove(folders.server);
        let figures = figures?;
        removed.map(|()| figures)
    }

    /// Makes a folder with the files.
    pub(crate) fn make(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).during(format!("making {}", folder.display()))?;
        match self.personality {
            Personality::Large => make_large(folder),
            personality => FileSet::make(folder, personality.shape(self.divide)),
        }
    }

    /// Measures, in a folder that shows the files.
    pub(crate) fn use_files(&self, folder: &Path, processors: usize, interrupt: &Interrupt) -> Result<Figures> {
        match self.personality {
            Personality::Large => read_large(folder, processors, interrupt),
            personality => self.serve(personality, folder, processors, interrupt),
        }
    }

    /// Removes a folder with all files.
    pub(crate) fn remove(folder: &Path) -> Result<()> {
        fs::remove_dir_all(folder).during(format!("removing {}", folder.display()))
    }

    fn serve(
        &self,
        personality: Personality,
        folder: &Path,
        processors: usize,
        interrupt: &Interrupt,
    ) -> Result<Figures> {
        let set = FileSet::at(folder, personality.shape(self.divide));
        let log_file = folder.join("log");
        let (stop, failed) = (AtomicBool::new(false), Mutex::new(None));
        let accounts = Accounts::now(std::process::id());
        let begin = Instant::now();
        let logs: Vec<Result<ThreadLog>> = thread::scope(|scope| {
            let (set, log_file, stop, failed) = (&set, log_file.as_path(), &stop, &failed);
            let worker = |number: u64| {
                move || {
                    let random = Random::new(number + 100);
                    let buffer = vec![b'y'; UNIT];
                    let mut worker = WorkloadThread { set, log_file, random, buffer, log: ThreadLog::new()? };
                    // One round at least, also if the time is over when this thread begins.
                    loop {
                        if let Err(e) = worker.round(personality) {
                            stop.store(true, Ordering::Relaxed);
                            if let Ok(mut failed) = failed.lock() {
                                failed.get_or_insert(e.to_string());
                            }
                        }
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    Ok(worker.log)
                }
            };
            let threads: Vec<_> = (0..personality.threads()).map(|number| scope.spawn(worker(number))).collect();
            while begin.elapsed() < self.time && !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
                if interrupt.check().is_err() {
                    if let Ok(mut failed) = failed.lock() {
                        failed.get_or_insert_with(String::new);
                    }
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
            let panicked = |_| Err(BenchError::Transport("a thread of a workload panicked".into()));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        let (wall, machine) = (begin.elapsed(), accounts.since(processors));
        match failed.into_inner().unwrap_or_default() {
            Some(why) if why.is_empty() => return Err(BenchError::Interrupted),
            Some(why) => return Err(BenchError::Transport(why)),
            None => {}
        }
        let mut all = ThreadLog::new()?;
        for log in logs {
            let log = log?;
            all.times.add(&log.times).map_err(|e| BenchError::transport("adding up times", e))?;
            all.bytes += log.bytes;
        }
        Ok(figures(&all, wall, machine))
    }
}

fn figures(all: &ThreadLog, wall: Duration, machine: Figures) -> Figures {
    let (operations, seconds) = (all.times.len() as f64, wall.as_secs_f64().max(1e-9));
    let busy = machine.get(&Metric::MachineCpuPercent).copied().unwrap_or(0.0) / 100.0 * seconds;
    Figures::from([
        (Metric::PerSecond, operations / seconds),
        (Metric::BytesPerSecond, all.bytes as f64 / seconds),
        (Metric::MeanNs, all.times.mean()),
        (Metric::P50Ns, all.times.value_at_quantile(0.5) as f64),
        (Metric::P99Ns, all.times.value_at_quantile(0.99) as f64),
        (Metric::CpuNsPerOperation, busy * 1e9 / operations.max(1.0)),
    ])
}

fn make_large(folder: &Path) -> Result<()> {
    let bytes = vec![b'z'; (LARGE / LARGE_FILES) as usize];
    for file in 0..LARGE_FILES {
        let path = folder.join(format!("large{file}"));
        fs::write(&path, &bytes).during(format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Reads files that this mount has not read before, so that its own page cache has nothing of them.
fn read_large(folder: &Path, processors: usize, interrupt: &Interrupt) -> Result<Figures> {
    let mut buffer = vec![0; UNIT];
    let mut log = ThreadLog::new()?;
    let (accounts, begin) = (Accounts::now(std::process::id()), Instant::now());
    for file in 0..LARGE_FILES {
        interrupt.check()?;
        let path = folder.join(format!("large{file}"));
        let open = File::open(&path).during(format!("opening {}", path.display()))?;
        let mut at = 0;
        loop {
            log.skip();
            let n = open.read_at(&mut buffer, at).during(format!("reading {}", path.display()))?;
            if n == 0 {
                break;
            }
            log.note(n as u64);
            at += n as u64;
        }
    }
    if log.bytes != LARGE {
        return Err(BenchError::Damaged(format!("{} bytes were read of {LARGE}", log.bytes)));
    }
    let wall = begin.elapsed();
    Ok(figures(&log, wall, accounts.since(processors)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_run_on_any_folder_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::catch().unwrap();
        let place = folder.path().join("work");
        for personality in [Personality::Mail, Personality::Web, Personality::File] {
            let work = FileWork { personality, divide: 100, time: Duration::ZERO };
            let figures = work.run(Folders { server: &place, client: &place }, 2, &interrupt).unwrap();
            assert!(figures[&Metric::PerSecond] > 0.0 && figures[&Metric::BytesPerSecond] > 0.0, "{personality:?}");
            assert!(!place.exists());
        }
    }

    #[test]
    fn failing_operation_ends_the_workload() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let work = FileWork { personality: Personality::Web, divide: 100, time: Duration::from_secs(60) };
        let folders = Folders { server: &folder.path().join("work"), client: elsewhere.path() };
        let error = work.run(folders, 2, &Interrupt::catch().unwrap()).unwrap_err();
        assert!(error.to_string().contains("opening"), "{error}");
    }

    #[test]
    fn parameters_are_those_of_filebench() {
        let full = |personality: Personality| personality.shape(1);
        assert_eq!(full(Personality::Mail), SetShape { files: 1_000, mean: 16384, width: 1_000_000, present: 80 });
        assert_eq!(full(Personality::Web), SetShape { files: 1_000, mean: 16384, width: 20, present: 100 });
        assert_eq!(full(Personality::File), SetShape { files: 10_000, mean: 131_072, width: 20, present: 80 });
        assert_eq!(Personality::File.shape(10).files, 1_000);
        assert_eq!(Personality::Web.shape(100).files, 200, "fewer would leave threads without a file");
    }
}
