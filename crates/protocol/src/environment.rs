//! Names that Partywall's programs and libraries agree on: environment variables, and the name of the library that `partywall run` preloads.
//!
//! Where a variable is unset or empty, the broker chooses.

/// The first part of a log filter (as of tracing's EnvFilter) that is neither a level nor names a module: a misspelt level, which EnvFilter takes for a
/// module, so that nothing is logged.
///
/// ```
/// use partywall_protocol::environment::misspelt_level;
///
/// assert_eq!(misspelt_level("info,partywalld=debug"), None);
/// assert_eq!(misspelt_level("warning"), Some("warning"));
/// ```
pub fn misspelt_level(filter: &str) -> Option<&str> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_level = |part: &str| {
        LEVELS.iter().any(|level| part.eq_ignore_ascii_case(level)) || part.parse::<u8>().is_ok_and(|n| n <= 5)
    };
    let names_module = |part: &str| part.contains(['=', '[', ':']) || part.starts_with("partywall");
    filter.split(',').map(str::trim).find(|part| !part.is_empty() && !is_level(part) && !names_module(part))
}

/// Path of the broker's socket.
pub const BROKER: &str = "PARTYWALL_BROKER";
/// Name of the domain to join as.
pub const DOMAIN: &str = "PARTYWALL_DOMAIN";
/// Number of the only user whose processes join as [`DOMAIN`], for a server whose workers have another user than its first process: a
/// domain belongs to one user. Unset, all do. Read by the preloaded library.
pub const DOMAIN_USER: &str = "PARTYWALL_DOMAIN_USER";
/// When connections go to a ring, in the words of [`crate::upgrade`].
pub const MOVES: &str = "PARTYWALL_MOVES";
/// Size of this process' rings in bytes: decimal, a power of two.
pub const RING: &str = "PARTYWALL_RING";
/// Longest time to spin, in microseconds: decimal; 0 sleeps at once.
pub const SPIN_US: &str = "PARTYWALL_SPIN_US";

/// A file that the library in a program writes a log to, for the person who looks into that program. Ignored where the program has more
/// rights than its caller.
pub const LOG: &str = "PARTYWALL_PRELOAD_LOG";

/// The connections that a program keeps through `exec`, for the same library in the program that follows in the same process: its number, and
/// for each connection the descriptor, the side and the socket's cookie. The library writes it and takes it out again; nobody else need set
/// or clear it.
pub const INHERITED: &str = "PARTYWALL_INHERITED";

/// The filter of log lines for the broker and the agent of a machine.
pub const LOG_FILTER: &str = "PARTYWALL_LOG";

/// The file name of the library that [`PRELOAD`] names. It makes a program's sockets transparent.
pub const LIBRARY: &str = "libpartywall_preload.so";
/// The dynamic loader's own variable: libraries to load before all others, separated by spaces or colons.
pub const PRELOAD: &str = "LD_PRELOAD";

/// All variables that Partywall reads, for programs that must clear them.
pub const ALL: [&str; 6] = [BROKER, DOMAIN, DOMAIN_USER, MOVES, RING, SPIN_US];
