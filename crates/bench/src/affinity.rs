//! The processors that the two measuring processes are pinned to.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, During, Result};

/// The processors of the active and of the passive side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Placement {
    /// Where the sender, or client, runs.
    pub(crate) active: usize,
    /// Where the receiver, or server, runs.
    pub(crate) passive: usize,
}

impl Placement {
    /// Takes `asked`, or else the first two processors that this process may use.
    pub(crate) fn choose(asked: Option<&[usize]>, same: bool) -> Result<Self> {
        let allowed = allowed()?;
        Self::among(&allowed, asked, same)
    }

    fn among(allowed: &[usize], asked: Option<&[usize]>, same: bool) -> Result<Self> {
        let (active, passive) = match asked {
            Some([one]) if same => (*one, *one),
            Some([a, b]) if !same || a == b => (*a, *b),
            Some(_) if same => {
                return Err(BenchError::Usage(
                    "--same-cpu takes one processor in --cpus, or the same one twice".into(),
                ));
            }
            Some(_) => return Err(BenchError::Usage("--cpus takes two processor numbers, as in --cpus 0,1".into())),
            None => {
                let first = *allowed
                    .first()
                    .ok_or_else(|| BenchError::Usage("this process may run on no processor at all".into()))?;
                let second = if same { Some(&first) } else { allowed.get(1) };
                let second = second.ok_or_else(|| {
                    BenchError::Usage("only one processor is available; measure with --same-cpu, or allow two (taskset, cgroup cpuset)".into())
                })?;
                (first, *second)
            }
        };
        for cpu in [active, passive] {
            if !allowed.contains(&cpu) {
                return Err(BenchError::Usage(format!(
                    "processor {cpu} is not available to this process; it may use {allowed:?}"
                )));
            }
        }
        Ok(Self { active, passive })
    }
}

/// Every processor this process may run on.
pub(crate) fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).during("asking which processors are available")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Pins the calling thread, and those it starts later.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).during(format!("pinning to processor {cpu}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_is_first_two_processors_by_default() {
        assert_eq!(Placement::among(&[2, 5, 7], None, false).unwrap(), Placement { active: 2, passive: 5 });
        assert_eq!(Placement::among(&[2, 5, 7], Some(&[7, 2]), false).unwrap(), Placement { active: 7, passive: 2 });
        assert_eq!(Placement::among(&[2, 5, 7], None, true).unwrap(), Placement { active: 2, passive: 2 });
        assert_eq!(Placement::among(&[2, 5], Some(&[5]), true).unwrap(), Placement { active: 5, passive: 5 });
    }

    #[test]
    fn unavailable_processors_are_rejected() {
        assert!(Placement::among(&[0], None, false).unwrap_err().to_string().contains("--same-cpu"));
        assert!(Placement::among(&[0, 1], Some(&[0, 9]), false).unwrap_err().to_string().contains("processor 9"));
        assert!(Placement::among(&[0, 1], Some(&[0]), false).is_err());
        assert!(Placement::among(&[0, 1], Some(&[0, 1]), true).is_err());
    }
}
