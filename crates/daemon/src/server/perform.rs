//! Performs the actions of the core: sends messages, and closes sockets.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use partywall_protocol::wire::{self, MachineId, Message, Refusal};
use partywall_region::directory::OwnDirectory;
use partywall_region::packet;
use partywall_region::pmem::book;

use super::descriptor::ClientDescriptor;
use super::judge::is_hung_up;
use super::published::Published;
use super::{ReadBy, Server, SessionSocket, now};
use crate::core::{Action, CoreEvent, OfferDelivery, SessionId};
use crate::machines::{Task, carried};

/// Bytes, with the kernel's bookkeeping, that may lie unread in a session's socket when something is added that it has not asked for.
const MOST_UNREAD: usize = 64 << 10;

impl Server {
    /// Does what the core said, tells it what became of that, and does what it says then.
    pub(super) fn perform(&mut self, actions: Vec<Action<ClientDescriptor>>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Send { session, request, message, descriptors } => {
                    match self.answer(session, request, &message, &descriptors) {
                        Ok(()) => continue,
                        // Its end is reported with what it gave up before (protocol C11.4), and whether its process has ended.
                        Err(error) if is_gone(&error) && self.has_hung_up(session) => continue,
                        Err(error) => {
                            let user = self.core.user_of_session(session);
                            if self.core.may_log(user) {
                                let user = user.map(tracing::field::display);
                                tracing::info!(user, %error, "session ended: it does not take its answers");
                            }
                            self.hang_up(session);
                            CoreEvent::Closed { session, by_program: false }
                        }
                    }
                }
                Action::Offer { session, channel, message, descriptors } => {
                    let delivery = self.offer(session, &message, &descriptors);
                    CoreEvent::Offered { channel, delivery }
                }
                Action::Directory(change) => {
                    self.directory.apply(&change);
                    continue;
                }
                Action::BeginDirectory { machine, window, base } => {
                    self.begin_directory(machine, &window, base);
                    continue;
                }
                Action::MachineDirectory { machine, change } => {
                    if let Some(directory) = self.machine_directories.get_mut(&machine) {
                        directory.apply(&change);
                    }
                    continue;
                }
                Action::EndDirectory { machine } => {
                    self.machine_directories.remove(&machine);
                    continue;
                }
                Action::Watch { flow, sockets } => match self.watch(flow, sockets) {
                    Some(side) => CoreEvent::FlowLost { flow, side },
                    None => continue,
                },
                Action::Unwatch { flow } => {
                    self.watch.remove(flow);
                    self.machine_sockets.remove(flow);
                    continue;
                }
                Action::Member { cookie, is_published } => {
                    self.watch.count_member(cookie, is_published);
                    continue;
                }
                Action::Book { window, base, size, in_use } => {
                    let noted = window.fd().map(|window| book::note(window, base..base.saturating_add(size), in_use));
                    if let Some(Err(error)) = noted {
                        tracing::debug!(%error, "a place of a window is not noted for the next broker");
                    }
                    continue;
                }
                Action::Order { session, request, order } => {
                    let told = self.attend_machines(Task::Order { session, request, order });
                    if let Err(e) = told {
                        let reason = format!("the broker cannot attend to virtual machines: {e}");
                        let refused = Message::Refused { code: Refusal::Machine, reason };
                        let answer = self.core.answer(session, request, refused);
                        answer.into_iter().rev().for_each(|action| actions.push_front(action));
                    }
                    continue;
                }
                Action::Close { session } => {
                    self.hang_up(session);
                    continue;
                }
            };
            let more = self.core.handle(now(), event);
            // Resulting actions come before the remaining ones: an offer is answered before all else.
            for action in more.into_iter().rev() {
                actions.push_front(action);
            }
        }
    }

    fn begin_directory(&mut self, machine: MachineId, window: &ClientDescriptor, base: u64) {
        let Some(window) = window.fd() else { return };
        match OwnDirectory::in_window(window, base) {
            Ok(directory) => {
                let published = Published::begin(directory, self.socket.instance());
                self.machine_directories.insert(machine, published);
            }
            Err(error) => {
                tracing::warn!(%machine, %error, "unmodified programs in this machine stay on TCP: it gets no directory");
            }
        }
    }

    /// Sends an answer; one that the kernel will not carry for its descriptors is replaced by a refusal.
    pub(super) fn answer(
        &mut self,
        to: SessionId,
        request: u32,
        message: &Message,
        with: &[ClientDescriptor],
    ) -> io::Result<()> {
        match self.send(to, request, message, with) {
            Err(e) if !with.is_empty() && !is_full(&e) && !is_gone(&e) => {
                let reason = format!("the descriptors cannot be sent: {e}");
                let refused = Message::Refused { code: Refusal::OutOfResources, reason };
                self.send(to, request, &refused, &[])
            }
            other => other,
        }
    }

    /// Whether no process has the other end of a session any more.
    fn has_hung_up(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|open| is_hung_up(&open.socket))
    }

    fn offer(&mut self, to: SessionId, message: &Message, with: &[ClientDescriptor]) -> OfferDelivery {
        // Messages of other sessions must leave room for the answers to its own requests. (A listener's connections are counted.)
        let is_counted = matches!(message, Message::Incoming { .. });
        if !is_counted && self.sessions.get(&to).is_some_and(|open| packet::unread(&open.socket) > MOST_UNREAD) {
            return OfferDelivery::Full;
        }
        match self.send(to, 0, message, with) {
            Ok(()) => OfferDelivery::Done,
            Err(e) if is_full(&e) => OfferDelivery::Full,
            Err(e) if is_gone(&e) => OfferDelivery::Gone,
            Err(e) => OfferDelivery::Failed(e.to_string()),
        }
    }

    fn send(&mut self, to: SessionId, request: u32, message: &Message, with: &[ClientDescriptor]) -> io::Result<()> {
        let Some(open) = self.sessions.get(&to) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        wire::encode(request, message, &mut self.outgoing);
        let nothing = || io::Error::other("one of them is none that can be passed on");
        let fds: Vec<BorrowedFd<'_>> = with.iter().map(|fd| fd.fd().ok_or_else(nothing)).collect::<io::Result<_>>()?;
        if matches!(open.read, ReadBy::EventLoop(_)) {
            // The thread at the machine's port passes packets on in this order.
            self.sent_to_machines += 1;
            carried::number(self.sent_to_machines, &mut self.outgoing);
        }
        packet::try_send(open.socket.as_fd(), &self.outgoing, &fds)?;
        Ok(())
    }

    /// Closes the socket of a session that the core has forgotten, or has it closed.
    pub(super) fn hang_up(&mut self, session: SessionId) {
        let Some(SessionSocket { socket, read }) = self.sessions.remove(&session) else { return };
        match read {
            ReadBy::EventLoop(machine) => {
                drop(socket);
                self.machine_turns.remove(machine);
            }
            ReadBy::Reader(reader) => self.readers.end(reader, session.0, socket),
            ReadBy::Nobody(account) => self.readers.dispose(Some(account), socket),
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}
