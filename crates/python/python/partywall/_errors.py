"""An exception for each outcome. Each is also the exception of Python's that a socket would raise."""


class Error(OSError):
    """What Partywall reports. The text says what failed, why, and what to do."""


class Empty(Error, BlockingIOError):
    """No data now, and the call was not to wait."""


class Full(Error, BlockingIOError):
    """No space now, and the call was not to wait."""


class TimedOut(Error, TimeoutError):
    """The time allowed has passed. Nothing was lost, and the operation can be repeated; but a server may still execute a call."""


class Closed(Error, BrokenPipeError):
    """The peer, or this side, has ended this direction."""

    seen = None
    """Of a call: whether the server had taken it. If not, it has not executed it."""


class Dead(Error, ConnectionAbortedError):
    """The peer has ended without closing. What it had written has been read."""

    seen = None
    """Of a call: whether the server had taken it. If not, it has not executed it."""


class Moved(Error, ConnectionAbortedError):
    """A virtual machine at one end of the connection is being migrated, and the peer has not died. What it had written has been read.
    Close the connection and connect again by the same name, which the text gives on the side that had connected. That succeeds once
    the machine is attached at its destination."""

    seen = None
    """Of a call: whether the server had taken it. If not, it has not executed it."""


class Corrupt(Error, ConnectionError):
    """The peer has broken the protocol. Only this connection is affected."""


class Accused(Error, ConnectionResetError):
    """The peer reports that this side has broken the protocol."""


class TooLarge(Error, ValueError):
    """More than the ring, the message or the buffer can hold."""


class Invalid(Error, ValueError):
    """An argument makes no sense."""


class NoBroker(Error, ConnectionRefusedError):
    """No broker answers."""


class Refused(Error, ConnectionRefusedError):
    """The broker has refused."""


class NotFound(Refused, FileNotFoundError):
    """No such domain or service now."""


class Denied(Refused, PermissionError):
    """The broker's policy does not allow it."""


class InUse(Refused):
    """Another program offers this service."""


class NoMemory(Error):
    """No memory of the kind that was asked for."""


class Forked(Error):
    """This process is the child of a fork, in which the library does nothing."""


class CallError(Error):
    """A call has no result."""


class UnknownMethod(CallError, LookupError):
    """The server has no such method."""


class CallRefused(CallError):
    """The server does not take this call."""


class BadPointer(CallError, ValueError):
    """A pointer or a length leads outside the memory of the side that sent it, or too many pointers were followed."""


class FunctionFailed(CallError, RuntimeError):
    """The called function has failed in a way that it did not plan: an exception, or a panic. The server goes on."""


class ApplicationError(CallError):
    """The called function's own error: a code from 1 to 2,147,482,647, and a text. A function raises it, and its client catches it."""

    def __init__(self, code, message=""):
        super().__init__(f"the called function failed with code {code}: {message}")
        self.code = code
        self.message = message
