"""Streams, messages and calls between processes, containers and virtual machines of one host, through shared memory.

    import partywall

    with partywall.Domain("visitor") as domain, domain.connect("web:echo") as stream:
        stream.sendall(b"hello")
        print(stream.recv(100))

A stream behaves as a socket does. Exceptions tell the outcomes apart: see `partywall.Error`. Coroutines are in `partywall.aio`.
"""

import atexit as _atexit
import os as _os

from ._errors import (
    Accused,
    ApplicationError,
    BadPointer,
    CallError,
    CallRefused,
    Closed,
    Corrupt,
    Dead,
    Denied,
    Empty,
    Error,
    Forked,
    Full,
    FunctionFailed,
    InUse,
    Invalid,
    Moved,
    NoBroker,
    NoMemory,
    NotFound,
    Refused,
    TimedOut,
    TooLarge,
    UnknownMethod,
)
from ._native import (
    Block,
    CallClient,
    CallServer,
    Domain,
    IncomingCall,
    Listener,
    MessageListener,
    MessageSocket,
    Ongoing,
    Peer,
    Stream,
    View,
    __version__,
    mark_child as _mark_child,
    pair,
    stop_servers as _stop_servers,
)

# A child of a fork shares its parent's rings and has none of the library's threads: there the library does nothing.
_os.register_at_fork(after_in_child=_mark_child)
# Functions of a server need the interpreter, so servers stop before it does.
_atexit.register(_stop_servers)

__all__ = [
    "Accused",
    "ApplicationError",
    "BadPointer",
    "Block",
    "CallClient",
    "CallError",
    "CallRefused",
    "CallServer",
    "Closed",
    "Corrupt",
    "Dead",
    "Denied",
    "Domain",
    "Empty",
    "Error",
    "Forked",
    "Full",
    "FunctionFailed",
    "InUse",
    "IncomingCall",
    "Invalid",
    "Listener",
    "MessageListener",
    "MessageSocket",
    "Moved",
    "NoBroker",
    "NoMemory",
    "NotFound",
    "Ongoing",
    "Peer",
    "Refused",
    "Stream",
    "TimedOut",
    "TooLarge",
    "UnknownMethod",
    "View",
    "pair",
]
