"""Streams and messages between processes, containers and virtual machines of one host, through shared memory.

    import partywall

    with partywall.Domain("visitor") as domain, domain.connect("web:echo") as stream:
        stream.sendall(b"hello")
        print(stream.recv(100))

A stream behaves as a socket does. Exceptions tell the outcomes apart: see `partywall.Error`. Coroutines are in `partywall.aio`.
"""

import os as _os

from ._errors import (
    Accused,
    Closed,
    Corrupt,
    Dead,
    Denied,
    Empty,
    Error,
    Forked,
    Full,
    InUse,
    Invalid,
    NoBroker,
    NoMemory,
    NotFound,
    Refused,
    TimedOut,
    TooLarge,
)
from ._native import (
    Domain,
    Listener,
    MessageListener,
    MessageSocket,
    Peer,
    Stream,
    __version__,
    mark_child as _mark_child,
    pair,
)

# A child of a fork shares its parent's rings and has none of the library's threads: there the library does nothing.
_os.register_at_fork(after_in_child=_mark_child)

__all__ = [
    "Accused",
    "Closed",
    "Corrupt",
    "Dead",
    "Denied",
    "Domain",
    "Empty",
    "Error",
    "Forked",
    "Full",
    "InUse",
    "Invalid",
    "Listener",
    "MessageListener",
    "MessageSocket",
    "NoBroker",
    "NoMemory",
    "NotFound",
    "Peer",
    "Refused",
    "Stream",
    "TimedOut",
    "TooLarge",
    "pair",
]
