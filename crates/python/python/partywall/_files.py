"""File objects of streams, as `socket.makefile` makes them of sockets."""

import io

from ._errors import Empty, Full


class StreamIO(io.RawIOBase):
    """A raw file object. Closing it leaves the stream open."""

    def __init__(self, stream, mode):
        self._stream = stream
        self._mode = mode

    def readable(self):
        return "r" in self._mode

    def writable(self):
        return "w" in self._mode

    def fileno(self):
        return self._stream.fileno()

    def readinto(self, buffer):
        self._checkReadable()
        if len(memoryview(buffer)) == 0:
            return 0
        try:
            return self._stream.recv_into(buffer)
        except Empty:
            return None

    def write(self, data):
        self._checkWritable()
        try:
            return self._stream.send(data)
        except Full:
            return None


def makefile(stream, mode="r", buffering=None, encoding=None, errors=None, newline=None):
    if not set(mode) <= {"r", "w", "b"} or not set(mode) & {"r", "w"}:
        raise ValueError(f"invalid mode {mode!r}: use r, w or rw, with b for bytes")
    binary = "b" in mode
    raw = StreamIO(stream, mode)
    if buffering is None or buffering < 0:
        buffering = io.DEFAULT_BUFFER_SIZE
    if buffering == 0:
        if not binary:
            raise ValueError("unbuffered streams must be binary")
        return raw
    if raw.readable() and raw.writable():
        buffer = io.BufferedRWPair(raw, raw, buffering)
    elif raw.readable():
        buffer = io.BufferedReader(raw, buffering)
    else:
        buffer = io.BufferedWriter(raw, buffering)
    if binary:
        return buffer
    return io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)
