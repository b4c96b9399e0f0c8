//! Whether the policy's lists of programs let this one have rings (protocol T6.1): asked once for each policy, and only if it has lists.

use super::session::{Turn, Urgency};
use super::settings;
use crate::log::log;
use crate::sys;
use partywall_protocol::wire::{BorrowedMessage, PolicyQuestion, User};
use std::sync::atomic::{AtomicU64, Ordering};

/// The last answer: the generation of its policy, above two bits. 0 before the first.
static ANSWER: AtomicU64 = AtomicU64::new(0);
/// There is an answer.
const KNOWN: u64 = 1;
/// It was no.
const UNLISTED: u64 = 2;

/// Whether this program is left out, by the policy of this generation; by an earlier one while the broker does not answer. The broker need
/// not be asked while it is away: what it has said holds. `errno` is left alone.
pub(super) fn is_left_out(generation: Option<u32>) -> bool {
    let known = ANSWER.load(Ordering::Relaxed);
    let Some(generation) = generation.map(|generation| u64::from(generation) << 2) else {
        return known & UNLISTED != 0;
    };
    if known & KNOWN != 0 && known & !(KNOWN | UNLISTED) == generation {
        return known & UNLISTED != 0;
    }
    let errno = sys::errno_number();
    let listed = ask();
    sys::restore_errno(errno);
    let Some(listed) = listed else { return known & UNLISTED != 0 };
    let answer = if listed { KNOWN } else { KNOWN | UNLISTED };
    ANSWER.store(generation | answer, Ordering::Relaxed);
    !listed
}

#[cold]
fn ask() -> Option<bool> {
    let turn = Turn::take(Urgency::Long).ok()?;
    let question = BorrowedMessage::TestPolicy {
        question: PolicyQuestion::Program,
        own: true,
        user: User::Host(0),
        gid: u32::MAX,
        to_own: true,
        to_user: User::Host(0),
        from: "",
        to: &settings::get().executable,
        service: "",
    };
    let answer = turn.ask(&question, &[], |answer, _| match answer {
        BorrowedMessage::PolicyDecides { allowed, .. } => Some(allowed),
        _ => None,
    });
    match answer {
        Ok(false) => {
            log!("the policy's list of programs leaves this one out");
            Some(false)
        }
        other => other.ok(),
    }
}
