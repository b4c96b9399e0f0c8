//! The table of messages (protocol C6): each kind once, with its fields in the order of the wire. Each file has the rows of one part of the
//! protocol. A number is used once in all of them.
//!
//! Everything that a number or a field's place decides comes from this table: [`Message`], [`BorrowedMessage`], their encoders, the
//! decoder, and the spelling that a test compares with docs/protocol.md.

mod channels;
mod datagrams;
mod groups;
mod hosts;
mod machines;
mod sessions;
mod sockets;

use alloc::string::String;

use super::declare::messages;
use super::{
    AddressList, BellWay, ChannelRow, Directions, DomainRow, EventRow, GroupRow, Kind, MachineRow, NameRow, Page,
    PolicyQuestion, Refusal, RegionReference, ServiceRow, Side, Text, User, What,
};
use channels::channels;
use datagrams::datagrams;
use groups::groups;
use hosts::hosts;
use machines::machines;
use sessions::sessions;
use sockets::sockets;

sessions! { channels, sockets, datagrams, machines, groups, hosts, messages; }

impl Message {
    /// Whether the message gives something up and has no answer. Such a message counts although its sender has closed the session since (protocol
    /// C11.4).
    pub fn is_farewell(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::DropRegion { .. } | Self::LetGo { .. })
    }
}
