//! Whether guests run on the processor or are emulated.

use std::fmt;

/// How a guest's instructions are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// By the processor.
    Kvm,
    /// Emulation by QEMU. Measurements in such guests are ratios, not absolute times.
    Tcg,
}

impl Accel {
    /// The command line. Two guests that share memory need `maxcpus=2` when emulated: a machine that can never have two
    /// processors is emulated without atomic instructions, which is right within it and wrong towards another.
    pub(crate) fn arguments(self) -> [&'static str; 6] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-smp", "1,maxcpus=2", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-smp", "1,maxcpus=2", "-cpu", "Nehalem,+rdrand"],
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "emulated (TCG)",
        })
    }
}
