//! Why a connection is not on the ring: a stable code, a sentence, and what would have to change.
//!
//! The codes are the same in `top`, `stat`, `why`, their JSON, and docs/reasons.md, which a test compares with this file.

use partywall::SocketPaths;
use partywall_shm::status::Reason;
use serde::{Serialize, Serializer};

/// Why the bytes of a connection go by TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The reason that the library in the program reports.
    Library(Reason),
    /// The library is not in the program.
    NoLibrary,
    /// The policy refuses the program's user.
    JoinRefused,
    /// The library has no session with the broker that answers us.
    NotJoined,
    /// The end that connected says nothing of a ring.
    PeerSilent,
    /// Both sides may use the ring, and move with the next bytes.
    Idle,
    /// A channel that its listener has not accepted.
    NotAccepted,
    /// The program has a library of another version.
    OtherLibrary,
    /// The library says no reason.
    Unknown,
}

impl Cause {
    /// The reasons that the library does not report.
    #[cfg(test)]
    const OTHERS: [Self; 8] = [
        Self::NoLibrary,
        Self::JoinRefused,
        Self::NotJoined,
        Self::PeerSilent,
        Self::Idle,
        Self::NotAccepted,
        Self::OtherLibrary,
        Self::Unknown,
    ];

    /// Every cause that there is.
    #[cfg(test)]
    fn all() -> impl Iterator<Item = Self> {
        let library = Reason::ALL.iter().copied().filter(|reason| *reason != Reason::None).map(Self::Library);
        library.chain(Self::OTHERS)
    }

    /// The reason that the library reports, or `otherwise` if it reports none.
    pub(super) fn library_or(reason: Reason, otherwise: Self) -> Self {
        if reason == Reason::None { otherwise } else { Self::Library(reason) }
    }

    /// The reason on the control page of one side of a connection; `None` if both directions use the ring.
    pub(crate) fn from_paths(paths: SocketPaths) -> Option<Self> {
        match (paths.sends_on_ring && paths.receives_on_ring, paths.wants_tcp) {
            (true, _) => None,
            (false, true) => Some(Self::Library(Reason::Told)),
            (false, false) => Some(Self::Idle),
        }
    }

    /// The word for programs, which never changes its meaning.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::Library(reason) => reason.code(),
            Self::NoLibrary => "no-library",
            Self::JoinRefused => "join-refused",
            Self::NotJoined => "not-joined",
            Self::PeerSilent => "peer-silent",
            Self::Idle => "idle",
            Self::NotAccepted => "not-accepted",
            Self::OtherLibrary => "other-library",
            Self::Unknown => "unknown",
        }
    }

    /// The sentence for people.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Library(reason) => reason.words(),
            Self::NoLibrary => "the library is not in the program (`partywall doctor` says why)",
            Self::JoinRefused => "the broker's policy does not let its user join",
            Self::NotJoined => "the program has not joined the broker (`partywall doctor -- PROGRAM`)",
            Self::PeerSilent => {
                "the peer offers no ring; it seems not to be under Partywall on this host or in one of its machines"
            }
            Self::Idle => "both sides are ready, and nothing was sent since",
            Self::NotAccepted => "not accepted yet",
            Self::OtherLibrary => {
                "the program has a library of another version, and this command cannot see where its bytes go"
            }
            Self::Unknown => "unknown",
        }
    }

    /// The required change.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Library(reason) => library_remedy(reason),
            Self::NoLibrary => {
                "start the program by `partywall run PROGRAM`; `partywall doctor -- PROGRAM` says what stands in the way"
            }
            Self::JoinRefused => {
                "add a [[join]] rule for the program's user to the broker's policy, and reload it; `partywall policy test` tells the effect"
            }
            Self::NotJoined => {
                "nothing, if the broker has just been started: the program joins it with the next calls on its connections; else start the program with \
                 PARTYWALL_BROKER set to the broker's socket, if that is not where programs look"
            }
            Self::PeerSilent => OTHER_END,
            Self::Idle => "nothing: the next bytes in that direction go by the ring",
            Self::NotAccepted => "the listening program has to accept it",
            Self::OtherLibrary => {
                "nothing, for the connection: it goes on as it is; restart the program to see it, or use the command of its library's version"
            }
            Self::Unknown => {
                "nothing is known; if it lasts, it is a bug to report with the output of `partywall why --json`"
            }
        }
    }
}

const OTHER_END: &str = "run the program at the other end under `partywall run` too, on this host or in a machine that is attached to the same broker; \
     if it is, and its address is translated on the way (a published port of a container), list the address by [[forward]] in the broker's policy";

fn library_remedy(reason: Reason) -> &'static str {
    match reason {
        Reason::None => "nothing",
        Reason::NoPeer => OTHER_END,
        Reason::MovesNever => {
            "`partywall moves` shows the rule that says never; `partywall moves --mode`, or `partywall run --move`, changes it"
        }
        Reason::TooShort => {
            "nothing: it moves when it has carried what the move rules ask for; `partywall moves --after-calls 1` moves it earlier"
        }
        Reason::BrokerAbsent => "start the broker (`partywalld`); the program joins it by itself",
        Reason::RawCalls => {
            "have the program use the C library's calls on this connection (no io_uring, no raw system calls)"
        }
        Reason::Shared => "let one process have the connection: it moves when the others have closed it",
        Reason::Option => {
            "leave out what only TCP does on this connection: urgent bytes, O_ASYNC, SO_LINGER with a time, options that attach programs"
        }
        Reason::Passed => "let the process that made the connection keep it, or connect again in the one that uses it",
        Reason::Exec => "close the connection before exec, or connect again after it",
        Reason::Corrupt => {
            "find out what the program at the other end is: its side of the ring was not what the protocol allows"
        }
        Reason::Refused => {
            "`journalctl -u partywalld --grep 'ring denied'`, or `partywall policy test --sockets --from NAME --to NAME:tcp-PORT` with the names of \
             `partywall list`, names the rule; it is tried again when the policy is loaded again"
        }
        Reason::Ambiguous => {
            "let the broker read sequence numbers: `partywall numbers on` and connect again; or give the broker CAP_NET_ADMIN (`systemctl edit \
             partywalld`: [Service] CapabilityBoundingSet=CAP_NET_ADMIN), and restart it"
        }
        Reason::PeerOnTcp => "ask about the other end: `partywall why` with the connection's address has its reason",
        Reason::Resources => {
            "raise the limits of memory or descriptors (`partywall doctor` shows them); it is tried again"
        }
        Reason::NotTaken => {
            "nothing, if the other program uses the connection soon: its library takes the offer up when it reads or writes; otherwise `partywall why` \
             with the connection's address has the reason of the other end. If it lasts for connections to a forwarded address, its [[forward]] in \
             the broker's policy may be wrong"
        }
        Reason::LinkLost => {
            "nothing, if the broker or an agent was restarted: the connection gets a ring again; see `partywall vm list`"
        }
        Reason::NoWindow => {
            "nothing, if a machine is being migrated or attached: it is tried again; otherwise attach both machines (`partywall vm list` shows them)"
        }
        Reason::ProgramNotListed => {
            "add the program to `allow` of [programs] in the broker's policy, or take it out of `deny`, and reload it; `partywall policy test --program` names the clause"
        }
        Reason::Told => {
            "`partywall moves` shows what holds now; a connection that may move goes back to the ring by itself"
        }
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = include_str!("../../../../docs/reasons.md");

    #[test]
    fn document_has_every_code_and_sentence_and_no_other() {
        let rows = DOCUMENT.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
        let documented: Vec<(&str, &str)> = rows.map(|(code, rest)| (code, rest.split(" |").next().unwrap())).collect();
        let known: Vec<(&str, &str)> = Cause::all().map(|cause| (cause.code(), cause.words())).collect();
        assert_eq!(documented, known);
    }

    #[test]
    fn codes_are_unique_kebab_case_words() {
        let mut codes: Vec<&str> = Cause::all().map(Cause::code).collect();
        let is_word = |code: &&str| code.bytes().all(|b| b.is_ascii_lowercase() || b == b'-') && !code.is_empty();
        assert!(codes.iter().all(is_word), "{codes:?}");
        let all = codes.len();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), all);
        assert!(Cause::all().all(|cause| !cause.remedy().is_empty() && !cause.words().is_empty()));
    }
}
