//! Machines that give up their windows to be migrated.

use partywall_protocol::wire::{Mobility, What};

use super::*;

const A: MachineId = MachineId::MIN;
const B: MachineId = MachineId::new(2).unwrap();
const SIZE: u64 = 8 << 20;

fn tell(w: &mut World, news: MachineNews<Fake>) {
    let actions = w.core.machine_news(NOW, news);
    w.perform(actions);
}

/// Two machines that see the windows between them.
fn attached() -> World {
    let mut w = World::with_policy("administrators = [1000]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n");
    for (machine, name) in [(A, "a"), (B, "b")] {
        let name = Name::new(name).unwrap();
        tell(&mut w, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
        tell(&mut w, MachineNews::Up { machine, up: true });
    }
    for (owner, peer) in [(A, B), (B, A)] {
        let (memory, reader) = (w.other(), w.other());
        let (from, to) = (owner.into(), peer.into());
        tell(&mut w, MachineNews::Window { owner: from, peer: to, memory, reader, size: SIZE, allocated: SIZE });
        for machine in [A, B] {
            tell(&mut w, MachineNews::Seen { machine, owner: from, peer: to });
        }
    }
    w
}

fn room(w: &mut World, session: u64, peer: &str) -> Result<u64, Refusal> {
    match w.say(session, Message::Room { channel: 0, size: 1 << 20, peer: peer.into() }, vec![]) {
        Some(Message::RoomIs { base, .. }) => Ok(base),
        Some(Message::Refused { code, .. }) => Err(code),
        other => panic!("{other:?}"),
    }
}

fn mobility(w: &mut World) -> Vec<(Mobility, String)> {
    let administrator = w.join("h", 1);
    let Message::Machines { page } = w.ask(administrator, Message::List { what: What::Machines, after: 0 }) else {
        panic!()
    };
    w.end(administrator);
    page.rows.into_iter().map(|row| (row.mobility, row.fixed_by)).collect()
}

#[test]
fn migrating_machine_gets_no_places_until_it_is_resumed() {
    let mut w = attached();
    let (a, b) = (w.join_as(A, "a", 7), w.join_as(B, "b", 8));
    let before = room(&mut w, b, "a").unwrap();
    tell(&mut w, MachineNews::Migrating { machine: A, leaves: true });
    assert_eq!(room(&mut w, b, "a"), Err(Refusal::Machine));
    assert_eq!(room(&mut w, a, "b"), Err(Refusal::Machine));
    tell(&mut w, MachineNews::Migrating { machine: A, leaves: false });
    assert!(room(&mut w, b, "a").unwrap() > before, "its place is another's");
}

#[test]
fn places_of_migrated_machine_are_not_given_to_others() {
    let mut w = attached();
    let (a, _b) = (w.join_as(A, "a", 7), w.join_as(B, "b", 8));
    let held = room(&mut w, a, "b").unwrap();
    tell(&mut w, MachineNews::Migrating { machine: A, leaves: true });
    // The port ends its sessions. A program of the guest may map the window for all that the host knows.
    w.lose(a);
    tell(&mut w, MachineNews::Up { machine: A, up: false });
    tell(&mut w, MachineNews::Migrating { machine: A, leaves: false });
    tell(&mut w, MachineNews::Up { machine: A, up: true });
    for (owner, peer) in [(A, B), (B, A)] {
        tell(&mut w, MachineNews::Seen { machine: A, owner: owner.into(), peer: peer.into() });
    }
    let again = w.join_as(A, "a", 7);
    assert!(room(&mut w, again, "b").unwrap() > held, "not the place that may be mapped");
}

#[test]
fn list_says_whether_machine_is_migratable_and_why_not() {
    let mut w = attached();
    assert!(mobility(&mut w).iter().all(|(is, why)| *is == Mobility::Fixed && !why.is_empty()), "not asked yet");
    tell(&mut w, MachineNews::Fixed { machine: A, by: None });
    tell(&mut w, MachineNews::Fixed { machine: B, by: Some("nvdimm".into()) });
    tell(&mut w, MachineNews::Fixed { machine: MachineId::MAX, by: None });
    assert_eq!(mobility(&mut w), [(Mobility::Migratable, String::new()), (Mobility::Fixed, "nvdimm".into())]);
    tell(&mut w, MachineNews::Migrating { machine: A, leaves: true });
    assert_eq!(mobility(&mut w)[0].0, Mobility::Migrating);
}
