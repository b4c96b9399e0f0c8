"""Coroutines for asyncio. One task at a time receives from a connection, and one sends.

    async with await aio.connect(domain, "web:echo") as stream:
        await stream.sendall(b"hello")
        print(await stream.recv(100))
"""

import asyncio
import functools

from ._errors import Empty, Full


async def _readable(fd):
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def _repeat(call, number):
    """Repeats a call that does not wait, each time that the descriptor is readable."""
    while True:
        try:
            return call()
        except (Empty, Full):
            await _readable(number())


async def _in_thread(call, *arguments, **options):
    """Runs a call that waits for the broker."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *arguments, **options))


class _Connection:
    def __init__(self, connection):
        connection.setblocking(False)
        self._connection = connection

    @property
    def peer(self):
        """The other side."""
        return self._connection.peer

    def close(self):
        """Closes the connection in order."""
        self._connection.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        self.close()


class AsyncStream(_Connection):
    """A stream driven by asyncio. It takes the stream over, and makes it non-blocking."""

    async def recv(self, bufsize):
        """Receives at most `bufsize` bytes; empty at the end of the stream."""
        return await _repeat(lambda: self._connection.recv(bufsize), self._connection.fileno)

    async def recv_into(self, buffer, nbytes=0):
        """Receives into a writable buffer, and returns how many bytes."""
        return await _repeat(lambda: self._connection.recv_into(buffer, nbytes), self._connection.fileno)

    async def send(self, data):
        """Sends bytes, and returns how many were taken."""
        return await _repeat(lambda: self._connection.send(data), self._connection.write_fileno)

    async def sendall(self, data):
        """Sends all of the bytes."""
        with memoryview(data) as view, view.cast("B") as rest:
            done = 0
            while done < len(rest):
                done += await self.send(rest[done:])

    def shutdown(self, how):
        """Ends receiving, sending or both, as `Stream.shutdown` does."""
        self._connection.shutdown(how)


class AsyncMessageSocket(_Connection):
    """A message socket driven by asyncio. It takes the socket over, and makes it non-blocking."""

    async def send(self, message):
        """Sends one message."""
        await _repeat(lambda: self._connection.send(message), self._connection.write_fileno)

    async def recv(self):
        """Receives one message."""
        return await _repeat(self._connection.recv, self._connection.fileno)

    def finish(self):
        """Ends sending."""
        self._connection.finish()


class AsyncListener(_Connection):
    """A listener driven by asyncio, for streams or messages. It is an asynchronous iterator of connections."""

    def __init__(self, listener, wrap):
        super().__init__(listener)
        self._wrap = wrap

    async def accept(self):
        """Waits for a connection."""
        connection, _ = await _repeat(self._connection.accept, self._connection.fileno)
        return self._wrap(connection)

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self.accept()


async def connect(domain, target, **options):
    """Connects a stream to `DOMAIN:SERVICE`."""
    return AsyncStream(await _in_thread(domain.connect, target, **options))


async def listen(domain, service, **options):
    """Offers a service for streams."""
    return AsyncListener(await _in_thread(domain.listen, service, **options), AsyncStream)


async def connect_messages(domain, target, **options):
    """Connects a message socket to `DOMAIN:SERVICE`."""
    return AsyncMessageSocket(await _in_thread(domain.connect_messages, target, **options))


async def listen_messages(domain, service, **options):
    """Offers a service for messages."""
    return AsyncListener(await _in_thread(domain.listen_messages, service, **options), AsyncMessageSocket)
