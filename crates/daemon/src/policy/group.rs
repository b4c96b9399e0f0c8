//! Groups as the operator's file names them (protocol J1).

use partywall_protocol::wire::Name;
use partywall_shm::group::{GROUPS, MEMBERS, STRIDE};
use serde::Deserialize;

use super::size;

/// Bytes for buffers in each member's window, unless told otherwise.
const ROOM: u64 = 64 << 20;

/// A group: members whose windows all of them see at the same addresses.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawGroup")]
pub struct GroupEntry {
    /// The name of the group.
    pub name: Name,
    /// Each with whether it is a virtual machine, and not a domain of the host.
    pub members: Vec<(Name, bool)>,
    /// Bytes for buffers in each member's window.
    pub room: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGroup {
    name: String,
    #[serde(default)]
    machines: Vec<String>,
    #[serde(default)]
    domains: Vec<String>,
    #[serde(default = "room", deserialize_with = "size::bytes")]
    room: u64,
}

fn room() -> u64 {
    ROOM
}

impl TryFrom<RawGroup> for GroupEntry {
    type Error = String;

    fn try_from(raw: RawGroup) -> Result<Self, String> {
        let named = |text: &str| Name::new(text).map_err(|e| format!("`{text}`: {e}"));
        let name = named(&raw.name)?;
        let all = raw.machines.iter().map(|m| (m, true)).chain(raw.domains.iter().map(|d| (d, false)));
        let mut members: Vec<(Name, bool)> = Vec::new();
        for (member, machine) in all {
            let member = named(member)?;
            if members.iter().any(|(other, _)| *other == member) {
                return Err(format!("group {name} names {member} twice"));
            }
            members.push((member, machine));
        }
        if !(1..=MEMBERS).contains(&members.len()) {
            return Err(format!("group {name} has {} members, and can have 1 to {MEMBERS}", members.len()));
        }
        let most = STRIDE / 4;
        if raw.room == 0 || raw.room > most {
            return Err(format!("group {name} has room for {} bytes, and can have 1 to {most}", raw.room));
        }
        Ok(Self { name, members, room: raw.room })
    }
}

/// Checks what only all of them together can have wrong.
pub(super) fn all<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<GroupEntry>, D::Error> {
    let groups = Vec::<GroupEntry>::deserialize(from)?;
    let wrong = |why: String| Err(serde::de::Error::custom(why));
    if groups.len() > GROUPS {
        return wrong(format!("there are {} groups, and can be {GROUPS}", groups.len()));
    }
    for (n, group) in groups.iter().enumerate() {
        if groups[..n].iter().any(|other| other.name == group.name) {
            return wrong(format!("there are two groups called {}", group.name));
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use crate::policy::Policy;

    fn fault(text: &str) -> String {
        Policy::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn groups_are_read_and_faults_named() {
        let text = "[[group]]\nname = \"pool\"\nmachines = [\"a\", \"b\"]\ndomains = [\"web\"]\n";
        let policy = Policy::parse(text).unwrap();
        let group = &policy.groups()[0];
        let members: Vec<(&str, bool)> =
            group.members.iter().map(|(name, machine)| (name.as_str(), *machine)).collect();
        assert_eq!((members, group.room), (vec![("a", true), ("b", true), ("web", false)], 64 << 20));
        for (text, why) in [
            (text.replace("\"web\"", "\"a\""), "names a twice"),
            (text.replace("\"web\"", "\"-\""), "`-`"),
            (text.replace("pool", ""), "``"),
            ("[[group]]\nname = \"x\"\n".to_owned(), "0 members"),
            (format!("{text}room = 0\n"), "room for 0 bytes"),
            (format!("{text}room = 68719476736\n"), "room for 68719476736"),
            (format!("{text}{text}"), "two groups called pool"),
            (format!("{text}seats = 3\n"), "seats"),
        ] {
            let said = fault(&text);
            assert!(said.contains(why), "{said}");
        }
        let many: String = (0..17).map(|n| text.replace("pool", &format!("g{n}"))).collect();
        assert!(fault(&many).contains("17 groups"));
    }
}
