//! The obstacles that keep the library out of a program, in words, with their remedies.

use super::privilege::Privilege;

/// One reason why the sockets of a program stay on TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingObstacle {
    /// No ELF file, or one that may not be read.
    NotElf,
    /// It has no dynamic loader, which would load the library.
    Static,
    /// Its runtime makes system calls without the C library.
    Go,
    /// It uses another C library, musl.
    Musl,
    /// A program of 32 bits.
    Bits,
    /// For another processor.
    Machine,
    /// It runs with rights that its caller has not.
    Privileged(Privilege),
}

impl RingObstacle {
    /// The obstacle in words.
    pub(crate) fn words(self) -> String {
        match self {
            Self::NotElf => "it is no ELF file that we may read".into(),
            Self::Static => "it is statically linked: no library is loaded into it".into(),
            Self::Go => "it is a Go program: its runtime makes system calls itself, where no library sees them".into(),
            Self::Musl => "it uses musl: the library is built for glibc".into(),
            Self::Bits => "it is a 32-bit program: the library has 64 bits".into(),
            Self::Machine => "it is for another processor than this machine's".into(),
            Self::Privileged(privilege) => {
                format!("it {}: the loader then ignores LD_PRELOAD", privilege.words())
            }
        }
    }

    /// The remedy.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::NotElf => "make it readable, or name the program itself",
            Self::Static => {
                "use a dynamically linked build of it; between virtual machines, the cards of `partywall net` speed it up as it is"
            }
            Self::Go => {
                "its connections stay on TCP; between virtual machines, the cards of `partywall net` speed it up as it is"
            }
            Self::Musl => "use a build for glibc",
            Self::Bits => "use a 64-bit build of it",
            Self::Machine => "use a build for this processor",
            Self::Privileged(_) => {
                "start it as a user for whom it gains nothing (root, often), or give it the rights in another way (AmbientCapabilities= of systemd)"
            }
        }
    }

    /// Whether the library may be named to the loader all the same: what the program starts may use it, and the program
    /// itself takes no notice.
    pub(crate) fn keeps_preload(self) -> bool {
        match self {
            Self::NotElf | Self::Static | Self::Go | Self::Privileged(_) => true,
            // musl's loader would fail, the others complain.
            Self::Musl | Self::Bits | Self::Machine => false,
        }
    }
}
