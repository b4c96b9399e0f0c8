//! How the slots of flows in the directory are shared out (protocol U10.3, U14.7): offers of flows have one each, and so do flows.
//!
//! ```text
//!   FLOWS slots   |<------ OF_MACHINES: all machines together ------>|<-- programs of the host -->|
//!                 | KEPT | KEPT | KEPT | ... |    first come,        |
//!                 |  a   |  b   |  c   |     |    first served       |
//! ```
//!
//! So machines leave half of the slots to the host, and those with many leave some to each machine that has few. A machine that is attached when the
//! others have all of theirs waits until they have fewer.

use partywall_protocol::directory::FLOWS;

/// The slots of one machine, at most.
pub(in crate::core) const OF_MACHINE: usize = 512;
/// The slots of all machines together.
const OF_MACHINES: usize = FLOWS / 2;
/// The slots that are kept for each attached machine; fewer with more than 64 machines.
const KEPT: usize = 32;

/// Whether a machine with `own` slots may have another one. `all`: the slots of each machine that has some. `machines`: how many are attached.
pub(super) fn may_have_another(own: usize, all: impl Iterator<Item = usize>, machines: usize) -> bool {
    let kept = KEPT.min(OF_MACHINES / machines.max(1));
    let (total, beyond) =
        all.fold((0, 0), |(total, beyond), slots| (total + slots, beyond + slots.saturating_sub(kept)));
    total < OF_MACHINES && (own < kept || (own < OF_MACHINE && machines * kept + beyond < OF_MACHINES))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has machines take what they get, one after the other.
    fn take_all(slots: &mut [usize], by: std::ops::Range<usize>) {
        for at in by {
            while may_have_another(slots[at], slots.iter().copied(), slots.len()) {
                slots[at] += 1;
            }
        }
    }

    #[test]
    fn one_machine_has_a_bounded_number_of_slots() {
        let mut slots = [0; 2];
        take_all(&mut slots, 0..1);
        assert_eq!(slots, [OF_MACHINE, 0]);
    }

    #[test]
    fn machines_leave_slots_to_the_host_and_to_one_another() {
        for machines in [1, 4, 5, 8, 64, 65, 300, 2048] {
            let mut slots = vec![0; machines];
            // The last one comes when the others have taken all that they get.
            take_all(&mut slots, 0..machines - 1);
            take_all(&mut slots, machines - 1..machines);
            assert!(slots.iter().sum::<usize>() <= FLOWS / 2, "{machines}");
            assert!(slots[machines - 1] >= KEPT.min(FLOWS / 2 / machines), "{machines}: {}", slots[machines - 1]);
        }
    }

    #[test]
    fn machines_attached_later_leave_slots_to_the_host() {
        let mut slots = vec![0; 4];
        for machines in [4, 8, 64, 2048] {
            slots.resize(machines, 0);
            take_all(&mut slots, 0..machines);
            assert!(slots.iter().sum::<usize>() <= FLOWS / 2, "{machines}");
        }
    }

    #[test]
    fn few_machines_have_all_that_one_may_have() {
        let mut slots = [0; 4];
        take_all(&mut slots, 0..4);
        assert_eq!(slots[..3], [OF_MACHINE; 3]);
        assert!(slots[3] >= OF_MACHINE - KEPT);
    }
}
