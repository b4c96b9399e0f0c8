use super::*;
use crate::disk::counters::CopiedBytes;
use crate::disk::driver::{DiskDriver, DiskDriverOptions};
use crate::disk::exported::{DiskExport, DiskExportOptions};
use crate::disk::request::DiskGeometry;
use crate::disk::store_task::StoreTask;
use crate::driver::DriverMemory;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo};

#[test]
fn bell_of_a_result_that_was_taken_before_ends_no_sleep() {
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (store, user) = (join("store"), join("user"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
    let _export = DiskExport::bind(options, &store, "data").unwrap();
    let (target, grace) = ("store:data".to_owned(), Duration::from_secs(60));
    let from = ImportOptions { domain: user, target, connections: 1, grace, group: None, machine: None };
    let mut disk = ImportedDisk::connect(from, false, Duration::ZERO).unwrap();
    disk.ring_around_look();
    let options = DiskOptions::new(folder.path().join("shown"));
    let (mut engine, _handle) = DiskEngine::on(Box::new(disk), options, &folder.path().join("socket"), None).unwrap();
    let (mut events, mut tokens) = (Vec::with_capacity(8), Vec::new());
    engine.poller.wait(0, &mut events, &mut tokens).unwrap();
    assert_eq!(tokens, [STORE]);
    engine.handle(STORE);
    engine.serve();
    engine.poller.wait(0, &mut events, &mut tokens).unwrap();
    assert!(tokens.is_empty(), "an idle disk is woken again");
}

/// A store without tasks, which another back end can open once this one is dropped.
#[derive(Debug, Default)]
struct SoughtStore {
    socket: std::path::PathBuf,
    was_there: Arc<AtomicBool>,
    are_all_ended: Arc<AtomicBool>,
    memory_changes: Arc<AtomicUsize>,
}

impl Drop for SoughtStore {
    fn drop(&mut self) {
        self.was_there.store(self.socket.exists(), Ordering::SeqCst);
    }
}

impl DiskStore for SoughtStore {
    fn geometry(&self, _: bool) -> DiskGeometry {
        DiskGeometry { capacity: 0, read_only: true, discards: false }
    }

    fn block(&self) -> u32 {
        512
    }

    fn refresh(&mut self) -> Result<bool, VhostError> {
        Ok(false)
    }

    fn grow(&mut self, _: u64) -> Result<(), VhostError> {
        Ok(())
    }

    fn takes(&self, _: &DiskTask) -> bool {
        false
    }

    fn by_copy(&mut self, _: &DiskTask, _: &GuestMemoryMmap) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn begin(&mut self, _: usize, _: StoreTask, _: &Arc<GuestMemoryMmap>, _: &[BufferPiece], _: usize) -> bool {
        false
    }

    fn submit(&mut self) {}

    fn busy(&self) -> usize {
        0
    }

    fn wait(&mut self) {}

    fn all_ended(&mut self) {
        self.are_all_ended.store(true, Ordering::SeqCst);
    }

    fn ended(&mut self) -> Option<(usize, Result<u32, Errno>)> {
        None
    }

    fn descriptor(&self) -> Result<OwnedFd, VhostError> {
        eventfd(0, EventfdFlags::CLOEXEC).map_err(VhostError::system("make an eventfd"))
    }

    fn copied(&self) -> CopiedBytes {
        CopiedBytes::default()
    }

    fn memory_changes(&mut self) {
        self.memory_changes.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn socket_of_a_disk_goes_before_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let was_there = Arc::new(AtomicBool::new(true));
    let mut store = SoughtStore::default();
    (store.socket, store.was_there) = (socket.clone(), Arc::clone(&was_there));
    let options = DiskOptions::new(folder.path().join("shown"));
    let (engine, _handle) = DiskEngine::on(Box::new(store), options, &socket, None).unwrap();
    assert!(socket.exists());
    drop(engine);
    assert!(!was_there.load(Ordering::SeqCst), "the next back end's socket would be removed");
}

#[test]
fn store_learns_that_all_tasks_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let store = SoughtStore::default();
    let are_all_ended = Arc::clone(&store.are_all_ended);
    let options = DiskOptions::new(folder.path().join("shown"));
    let (mut engine, _handle) = DiskEngine::on(Box::new(store), options, &folder.path().join("socket"), None).unwrap();
    engine.finish_tasks();
    assert!(are_all_ended.load(Ordering::SeqCst), "later requests would have the time of those that were waited for");
}

#[test]
fn store_learns_of_each_change_of_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let store = SoughtStore::default();
    let changes = Arc::clone(&store.memory_changes);
    let options = DiskOptions::new(folder.path().join("shown"));
    let (engine, handle) = DiskEngine::on(Box::new(store), options, &socket, None).unwrap();
    let engine = std::thread::spawn(|| engine.run());
    let mut driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
    let memory = DriverMemory::new(0x1_0000, true).unwrap();
    let (guest_phys_addr, userspace_addr) = (AwayDisk::AT, 0x7f00_0000_0000);
    let region = VhostUserMemoryRegionInfo { guest_phys_addr, userspace_addr, ..memory.region() };
    let own = driver.region();
    let frontend = driver.frontend().unwrap();
    let wanted = Protocol::MQ | Protocol::REPLY_ACK | Protocol::CONFIG | Protocol::CONFIGURE_MEM_SLOTS;
    frontend.set_protocol_features(wanted).unwrap();
    // Requests are served one after the other.
    frontend.get_features().unwrap();
    assert_eq!(changes.swap(0, Ordering::SeqCst), 1, "the driver has sent its memory");
    frontend.add_mem_region(&region).unwrap();
    frontend.get_features().unwrap();
    assert_eq!(changes.swap(0, Ordering::SeqCst), 1, "a region is new");
    frontend.remove_mem_region(&region).unwrap();
    frontend.get_features().unwrap();
    assert_eq!(changes.swap(0, Ordering::SeqCst), 1, "a region has gone");
    frontend.set_mem_table(&[own]).unwrap();
    frontend.get_features().unwrap();
    assert_eq!(changes.swap(0, Ordering::SeqCst), 1, "the table is another one");
    frontend.get_vring_base(0).unwrap();
    assert_eq!(changes.swap(0, Ordering::SeqCst), 1, "the machine may start again");
    handle.ask(DiskControl::Stop).unwrap();
    engine.join().unwrap().unwrap();
}

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(60);

/// A disk whose exporter comes and goes, and a driver with memory beside its own.
struct AwayDisk {
    store: partywall::Domain,
    path: std::path::PathBuf,
    export: Option<DiskExport>,
    handle: DiskHandle,
    engine: Option<std::thread::JoinHandle<Result<(), VhostError>>>,
    driver: DiskDriver,
    memory: DriverMemory,
    // These end last.
    _broker: partywall_daemon::Broker,
    _folder: tempfile::TempDir,
}

impl AwayDisk {
    /// Where the memory beside the driver's own is for the guest.
    const AT: u64 = 1 << 32;

    fn new() -> Self {
        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, domain) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let [path, socket] = ["disk.raw", "socket"].map(|name| folder.path().join(name));
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let export = Some(Self::export(&path, &store));
        let (target, grace) = ("store:data".to_owned(), Duration::from_secs(3600));
        let from = ImportOptions { domain, target, connections: 1, grace, group: None, machine: None };
        let (engine, handle) = DiskEngine::import(DiskOptions::new("store:data"), from, &socket, None).unwrap();
        let engine = Some(std::thread::spawn(|| engine.run()));
        let mut driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
        let wanted = Protocol::MQ
            | Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::INFLIGHT_SHMFD
            | Protocol::CONFIGURE_MEM_SLOTS;
        driver.frontend().unwrap().set_protocol_features(wanted).unwrap();
        let memory = DriverMemory::new(0x1_0000, true).unwrap();
        let disk = Self { store, path, export, handle, engine, driver, memory, _broker: broker, _folder: folder };
        disk.with_memory_added()
    }

    fn export(path: &Path, store: &partywall::Domain) -> DiskExport {
        let options =
            DiskExportOptions { path: path.into(), read_only: false, direct: false, discard: true, group: None };
        DiskExport::bind(options, store, "data").unwrap()
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        let (guest_phys_addr, userspace_addr) = (Self::AT, 0x7f00_0000_0000);
        VhostUserMemoryRegionInfo { guest_phys_addr, userspace_addr, ..self.memory.region() }
    }

    fn with_memory_added(mut self) -> Self {
        let region = self.region();
        self.driver.frontend().unwrap().add_mem_region(&region).unwrap();
        self
    }

    fn remove_memory(&mut self) {
        let region = self.region();
        self.driver.frontend().unwrap().remove_mem_region(&region).unwrap();
    }

    /// The front end sends its whole table, as one without slots does: the driver's own memory, and these regions.
    fn set_table(&mut self, others: &[VhostUserMemoryRegionInfo]) {
        let all = [&[self.driver.region()], others].concat();
        self.driver.frontend().unwrap().set_mem_table(&all).unwrap();
    }

    /// The exporter comes back, and the request that has waited is done.
    fn finish_with_exporter(&mut self) {
        assert_eq!(self.driver.reply(0).unwrap(), None, "the request has ended for the memory");
        self.export = Some(Self::export(&self.path, &self.store));
        let reply = self.driver.wait(0, Duration::ZERO, HANG).unwrap();
        assert_eq!(reply.expect("the request was lost").status, DiskStatus::Done.byte());
    }

    /// The request that has waited for the exporter has ended.
    fn has_failed(&mut self) {
        let reply = self.driver.reply(0).unwrap().expect("the request is under way");
        assert_eq!(reply.status, DiskStatus::Failed.byte());
    }

    /// The exporter goes, and then a request reads the first sectors to `address`. Returns once the back end has taken it.
    fn read_without_exporter(&mut self, address: u64) {
        let place = self.driver.take_place(0).unwrap();
        let header = self.driver.header(0, place);
        self.driver.memory().write_slice(&[0; 16], header).unwrap();
        self.read_with_header(place, header.0, address);
    }

    /// The same, with the request's header, which is all zeroes, and its status at `header`.
    fn read_with_header(&mut self, place: u16, header: u64, address: u64) {
        self.export = None;
        let first = 3 * place;
        let memory = self.driver.memory().clone();
        let [next, write] = [virtio_ring::VRING_DESC_F_NEXT, virtio_ring::VRING_DESC_F_WRITE];
        let ring = &mut self.driver.rings[0];
        ring.describe(&memory, first, header, 16, next, first + 1).unwrap();
        ring.describe(&memory, first + 1, address, 4096, next | write, first + 2).unwrap();
        ring.describe(&memory, first + 2, header + 16, 1, write, 0).unwrap();
        ring.offer(&memory, first).unwrap();
        self.driver.kick(0).unwrap();
        let under_way = || {
            let report = self.handle.ask(DiskControl::Show).unwrap();
            serde_json::from_value::<DiskReport>(report).unwrap().under_way
        };
        let deadline = Instant::now() + HANG;
        while under_way() == 0 {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}

impl Drop for AwayDisk {
    fn drop(&mut self) {
        let _ = self.handle.ask(DiskControl::Stop);
        let end = self.engine.take().map(std::thread::JoinHandle::join);
        if !std::thread::panicking() {
            end.unwrap().unwrap().unwrap();
        }
    }
}

#[test]
fn request_outside_of_removed_memory_goes_on() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(disk.driver.data(0, 0).0);
    // The second time, there is no such memory.
    (0..2).for_each(|_| disk.remove_memory());
    disk.finish_with_exporter();
}

#[test]
fn request_in_removed_memory_ends_first() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(AwayDisk::AT + 4096);
    disk.remove_memory();
    disk.has_failed();
}

#[test]
fn request_outside_of_a_tables_changes_goes_on() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(disk.driver.data(0, 0).0);
    disk.set_table(&[]);
    disk.set_table(&[disk.region()]);
    disk.finish_with_exporter();
}

#[test]
fn request_in_memory_that_a_table_keeps_goes_on() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(AwayDisk::AT + 4096);
    disk.memory.map.write_slice(&[7; 4096], GuestAddress(4096)).unwrap();
    disk.set_table(&[disk.region()]);
    disk.finish_with_exporter();
    let mut read = [7; 4096];
    disk.memory.map.read_slice(&mut read, GuestAddress(4096)).unwrap();
    assert_eq!(read, [0; 4096], "the data is elsewhere");
}

#[test]
fn request_in_memory_that_a_table_drops_ends_first() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(AwayDisk::AT + 4096);
    disk.set_table(&[]);
    disk.has_failed();
}

#[test]
fn request_of_a_queue_that_a_table_drops_ends_first() {
    let mut disk = AwayDisk::new();
    let place = disk.driver.take_place(0).unwrap();
    // Nothing but the queue lies in the driver's own memory.
    disk.read_with_header(place, AwayDisk::AT, AwayDisk::AT + 4096);
    let region = disk.region();
    disk.driver.frontend().unwrap().set_mem_table(&[region]).unwrap();
    assert!(disk.driver.reply(0).unwrap().is_some(), "the request is under way");
}

#[test]
fn request_in_memory_of_another_file_ends_first() {
    let mut disk = AwayDisk::new();
    disk.read_without_exporter(AwayDisk::AT + 4096);
    let other = DriverMemory::new(0x1_0000, true).unwrap();
    let VhostUserMemoryRegionInfo { guest_phys_addr, userspace_addr, .. } = disk.region();
    disk.set_table(&[VhostUserMemoryRegionInfo { guest_phys_addr, userspace_addr, ..other.region() }]);
    disk.has_failed();
}
