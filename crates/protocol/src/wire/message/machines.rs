//! Virtual machines and the places in their windows (protocol G).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! machines {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
    /// Client, an administrator: this virtual machine belongs to us (protocol G1).
    34 AddMachine {
        /// Bytes that regions can have in each of its windows.
        room: u64,
        /// Only with devices that a live migration allows.
        migratable: bool,
        /// The name of the machine.
        name: String,
        /// The path of its monitor.
        monitor: String,
        /// The path of the host's end of its serial port.
        port: String,
    }
    /// Broker: the answer to `AddMachine`.
    35 MachineAdded {
        /// The number of the machine.
        machine: u32,
        /// Windows that were plugged into it now.
        plugged: u32,
        /// Microseconds that the host took for them.
        took_us: u64,
        /// A remark about a degraded state; empty if there is none.
        remark: Text,
    }
    /// Client, an administrator: it no longer does.
    36 RemoveMachine {
        /// The name of the machine.
        name: String,
    }
    /// Client, an administrator: this machine is to be migrated, so it gives up its windows (protocol G7). Answered by `Done` once it
    /// has.
    66 ReleaseMachine {
        /// The name of the machine.
        name: String,
    }
    /// Client, an administrator: a released machine stays here after all. Answered by `MachineAdded`.
    67 ResumeMachine {
        /// The name of the machine.
        name: String,
    }
    /// Broker: the answer to `List`.
    37 Machines {
        /// The machines of this page.
        page: Page<MachineRow>,
    }
    /// Client: a place for my region in the window towards a domain on another machine (protocol G4).
    32 Room {
        /// The channel that is being accepted; 0 before connecting.
        channel: u64,
        /// Bytes of the region.
        size: u64,
        /// The domain on the other side.
        peer: String,
    }
    /// Broker: the answer to `Room`. Brings the window.
    33 RoomIs {
        /// Where in the window the region is to begin.
        base: u64,
        /// Bytes of the region, as many as were asked for.
        size: u64,
    }
    } };
}
pub(super) use machines;
