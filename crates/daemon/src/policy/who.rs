//! Users and groups, by name or number, resolved once when the policy is read.

use nix::unistd;
use serde::Deserialize;

use crate::core::{HOST, machine_of};

/// A user, or everyone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NameOrNumber")]
pub enum User {
    /// Every user. Virtual machines are none.
    Any,
    /// The user with this id.
    Id(u32),
}

impl User {
    /// Whether this is the user `uid`.
    pub fn is(self, uid: u32) -> bool {
        match self {
            Self::Any => machine_of(uid) == HOST,
            Self::Id(id) => id == uid && machine_of(uid) == HOST,
        }
    }
}

/// A group, or everyone's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NameOrNumber")]
pub enum Group {
    /// Every group.
    Any,
    /// The group with this id, and the users whom the group database listed in it.
    Id {
        /// Of those whose primary group it is.
        gid: u32,
        /// Those who are in it besides.
        members: Vec<u32>,
    },
}

impl Group {
    /// Whether the user `uid`, whose primary group is `gid`, is in it.
    pub fn has(&self, uid: u32, gid: u32) -> bool {
        match self {
            _ if machine_of(uid) != HOST => false,
            Self::Any => true,
            Self::Id { gid: id, members } => *id == gid || members.contains(&uid),
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

impl TryFrom<NameOrNumber> for User {
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

impl TryFrom<NameOrNumber> for Group {
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
