//! Users and groups, by name or number, resolved once when the policy is read.

use nix::unistd;
use partywall_protocol::wire::User;
use serde::Deserialize;

use crate::credentials::Credentials;

/// A user of the host, or all of them. Virtual machines are no users of the host, whatever number is written (protocol G1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NameOrNumber")]
pub enum HostUser {
    /// Every user.
    Any,
    /// The user with this id.
    Id(u32),
}

impl HostUser {
    /// Whether this is that user.
    pub fn is(self, user: User) -> bool {
        match (self, user) {
            (_, User::Machine(_)) => false,
            (Self::Any, User::Host(_)) => true,
            (Self::Id(id), User::Host(uid)) => id == uid,
        }
    }
}

/// A group of users of the host, or everyone's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NameOrNumber")]
pub enum HostGroup {
    /// Every group.
    Any,
    /// The group with this id, and the users whom the group database listed in it.
    Id {
        /// The id of the group, which its users may have as their primary group.
        gid: u32,
        /// The users that the group database listed in the group.
        members: Vec<u32>,
    },
}

impl HostGroup {
    /// Whether the user of this process is in it.
    pub fn has(&self, peer: Credentials) -> bool {
        let User::Host(uid) = peer.user else { return false };
        match self {
            Self::Any => true,
            Self::Id { gid, members } => peer.gid == Some(*gid) || members.contains(&uid),
        }
    }
}

/// As it stands in the file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a name in quotes or a number that is not negative")]
enum NameOrNumber {
    Number(u32),
    Name(String),
}

impl TryFrom<NameOrNumber> for HostUser {
    type Error = String;

    fn try_from(who: NameOrNumber) -> Result<Self, String> {
        let name = match who {
            NameOrNumber::Number(uid) => return Ok(Self::Id(uid)),
            NameOrNumber::Name(name) if name == "*" => return Ok(Self::Any),
            NameOrNumber::Name(name) => name,
        };
        match unistd::User::from_name(&name) {
            Ok(Some(user)) => Ok(Self::Id(user.uid.as_raw())),
            Ok(None) => Err(format!("this machine has no user {name:?}; write its number, or \"*\" for everyone")),
            Err(e) => Err(format!("cannot look up the user {name:?}: {e}")),
        }
    }
}

impl TryFrom<NameOrNumber> for HostGroup {
    type Error = String;

    fn try_from(who: NameOrNumber) -> Result<Self, String> {
        let found = match &who {
            NameOrNumber::Number(gid) => unistd::Group::from_gid(unistd::Gid::from_raw(*gid)),
            NameOrNumber::Name(name) if name == "*" => return Ok(Self::Any),
            NameOrNumber::Name(name) => unistd::Group::from_name(name),
        };
        match (found, who) {
            (Ok(Some(group)), _) => Ok(Self::Id {
                gid: group.gid.as_raw(),
                members: group
                    .mem
                    .iter()
                    .filter_map(|name| unistd::User::from_name(name).ok().flatten())
                    .map(|user| user.uid.as_raw())
                    .collect(),
            }),
            // A number means something without a name too: a container's group, for instance.
            (Ok(None), NameOrNumber::Number(gid)) => Ok(Self::Id { gid, members: Vec::new() }),
            (Ok(None), NameOrNumber::Name(name)) => {
                Err(format!("this machine has no group {name:?}; write its number, or \"*\" for everyone"))
            }
            (Err(e), NameOrNumber::Number(gid)) => Err(format!("cannot look up the group {gid}: {e}")),
            (Err(e), NameOrNumber::Name(name)) => Err(format!("cannot look up the group {name:?}: {e}")),
        }
    }
}
