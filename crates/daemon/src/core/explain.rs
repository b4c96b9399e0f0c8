//! `TestPolicy`: what the policy would decide, and which clause of it (protocol C17).

use std::path::Path;

use partywall_protocol::wire::{Message, Name, Origin, PolicyQuestion, Refusal, User};

use super::refuse::{self, Refuse, refuse};
use super::{Core, Descriptor, SessionId};
use crate::credentials::{Credentials, Home};
use crate::policy::Grounds;

/// A client's question, as it came.
#[derive(Debug)]
pub(super) struct PolicyQuery {
    pub(super) question: PolicyQuestion,
    /// The user that the question is about.
    pub(super) of: AskedUser,
    /// The user of the other side, whose group decides nothing.
    pub(super) to: AskedUser,
    pub(super) names: [String; 3],
}

/// The user that a client asks about.
#[derive(Debug, Clone, Copy)]
pub(super) enum AskedUser {
    /// The asking user itself.
    Own,
    /// A user of the host, where the broker runs, or of a virtual machine.
    Other { user: User, gid: Option<u32> },
}

/// A domain and the other host that it is on.
fn on_host(text: &str) -> Result<(Name, Name), Refuse> {
    match text.split_once('@') {
        Some((domain, host)) => Ok((refuse::name(domain)?, refuse::name(host)?)),
        None => refuse(Refusal::NameInvalid, "a domain of another host is called DOMAIN@HOST"),
    }
}

impl AskedUser {
    fn credentials(self, own: Credentials) -> Credentials {
        match self {
            Self::Own => own,
            Self::Other { user: User::Machine(machine), .. } => Credentials::in_machine(machine, 0),
            Self::Other { user, gid } => Credentials { user, gid, home: Home::Broker, pid: 0 },
        }
    }
}

impl<F: Descriptor> Core<F> {
    /// Answers what the policy would decide. Nothing changes, and nothing is kept.
    pub(super) fn test_policy(&mut self, id: SessionId, request: u32, asked: &PolicyQuery) -> Result<(), Refuse> {
        let Some((_, _, own)) = self.member(id) else { return Ok(()) };
        // A number equal to its own does not make it a question of the client about itself: in a container it is another user's.
        // A domain of another host is no client's own (protocol C17.4).
        let about_others = asked.question == PolicyQuestion::ConnectFrom
            || matches!(asked.of, AskedUser::Other { .. })
            || (asked.question == PolicyQuestion::Sockets && matches!(asked.to, AskedUser::Other { .. }));
        if about_others && !self.policy.is_administrator(own) {
            return refuse(
                Refusal::Denied,
                format!(
                    "{} is not an administrator, and only administrators may ask about other users and hosts",
                    own.user
                ),
            );
        }
        if asked.question == PolicyQuestion::Program {
            let known = self.program_of(id);
            let [path, word, _] = &asked.names;
            let path = if path.is_empty() { known.unwrap_or(word) } else { path };
            let answer = self.decision(own, &self.policy.judge_program(path));
            self.send(id, request, answer);
            return Ok(());
        }
        let peer = asked.of.credentials(own);
        let [from, to, service] = &asked.names;
        if asked.question == PolicyQuestion::ConnectFrom {
            let (from, host) = on_host(from)?;
            let (to, service) = (refuse::name(to)?, refuse::name(service)?);
            let grounds = match self.policy.cluster() {
                Some(_) => self.policy.judge_connect_from((&from, &host), &to, &service),
                None => Grounds::NoCluster,
            };
            let answer = self.decision(own, &grounds);
            self.send(id, request, answer);
            return Ok(());
        }
        let from = self.qualified(peer, refuse::name(from)?)?;
        // Whether `from` is the user's to be comes first: otherwise anyone could read the rules of every domain.
        let mut grounds = self.judge_join(peer, &from)?;
        if grounds.allow() && asked.question != PolicyQuestion::Join {
            let service = refuse::name(service)?;
            let to_here = || Ok(self.meant(peer, refuse::name(to)?));
            grounds = match asked.question {
                PolicyQuestion::Sockets => {
                    let one_user = peer.is_user_of(asked.to.credentials(own));
                    self.policy.judge_share(peer, one_user, (&from, &to_here()?), &service)
                }
                PolicyQuestion::ConnectTo => {
                    let (to, host) = on_host(to)?;
                    match self.policy.cluster() {
                        Some(_) => self.policy.judge_connect_to(peer, &from, (&to, Some(&host)), &service),
                        None => Grounds::NoCluster,
                    }
                }
                _ => self.policy.judge_connect(peer, &from, &to_here()?, &service),
            };
        }
        let answer = self.decision(own, &grounds);
        self.send(id, request, answer);
        Ok(())
    }

    /// The answer to a client.
    fn decision(&self, client: Credentials, grounds: &Grounds<'_>) -> Message {
        // Where the file is, is no business of a container's or a virtual machine's.
        let at_home = client.home == Home::Broker;
        let file = self.policy.file().map(Path::display).map(|path| path.to_string());
        let line = self.policy.line_of(grounds).filter(|_| at_home).and_then(|line| u32::try_from(line).ok());
        Message::PolicyDecides {
            allowed: grounds.allow(),
            line: line.unwrap_or(0),
            grounds: grounds.to_string(),
            file: file.filter(|_| at_home).unwrap_or_default(),
        }
    }

    /// The executable of a session's program, where the broker could read it.
    fn program_of(&self, id: SessionId) -> Option<&String> {
        self.sessions.get(&id)?.program.as_ref()
    }

    /// Refuses a program that the policy's lists leave out, if the broker knows which program it is (protocol T6.1). A library that follows
    /// the answer to its own question does not come here.
    pub(super) fn may_move(&self, id: SessionId) -> Result<(), Refuse> {
        let Some(program) = self.program_of(id) else { return Ok(()) };
        let grounds = self.policy.judge_program(program);
        if grounds.allow() {
            Ok(())
        } else {
            refuse(Refusal::Denied, format!("{program} is not accelerated: {grounds}"))
        }
    }

    /// Whether the policy lets this user join under a name, and why.
    pub(super) fn judge_join(&self, peer: Credentials, name: &Name) -> Result<Grounds<'_>, Refuse> {
        match peer.origin() {
            Origin::Host => Ok(self.policy.judge_join(peer, name)),
            Origin::Machine(number) => match self.machines.name(number) {
                Some(machine) => Ok(self.policy.judge_join_machine(machine, name)),
                None => refuse(Refusal::Machine, format!("there is no virtual machine {number}")),
            },
        }
    }
}
