"""Coroutines for asyncio. One task at a time receives from a connection, and one sends.

    async with await aio.connect(domain, "web:echo") as stream:
        await stream.sendall(b"hello")
        print(await stream.recv(100))
"""

import asyncio
import concurrent.futures
import functools
import queue
import threading

from ._errors import CallRefused, Empty, Full


async def _in_thread(call, *arguments, pool=None, **options):
    """Runs a call that waits for the broker."""
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(call, *arguments, **options))


# Calls under way of a client that is called back. The thread that waits for a call executes what the server calls back during it, so each has one.
_TURNS = 8


class _Connection:
    def __init__(self, connection):
        connection.setblocking(False)
        self._connection = connection
        self._waits = {}

    @property
    def peer(self):
        """The other side."""
        return self._connection.peer

    def close(self):
        """Closes the connection in order. A task that waits for it gets `Closed`."""
        # First: the event loop must not keep the number of a closed descriptor, which another connection may get.
        waits, self._waits = self._waits, {}
        try:
            for fd, ready in waits.items():
                ready.get_loop().remove_reader(fd)
                ready.done() or ready.set_result(None)
        finally:
            self._connection.close()

    async def _repeat(self, call, number):
        """Repeats a call that does not wait, each time that the descriptor is readable."""
        while True:
            try:
                return call()
            except (Empty, Full):
                await self._readable(number())

    async def _readable(self, fd):
        loop = asyncio.get_running_loop()
        self._waits[fd] = ready = loop.create_future()
        loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            if self._waits.get(fd) is ready:
                del self._waits[fd]
                loop.remove_reader(fd)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        self.close()


class AsyncStream(_Connection):
    """A stream driven by asyncio. It takes the stream over, and makes it non-blocking."""

    async def recv(self, bufsize):
        """Receives at most `bufsize` bytes; empty at the end of the stream."""
        return await self._repeat(lambda: self._connection.recv(bufsize), self._connection.fileno)

    async def recv_into(self, buffer, nbytes=0):
        """Receives into a writable buffer, and returns how many bytes."""
        return await self._repeat(lambda: self._connection.recv_into(buffer, nbytes), self._connection.fileno)

    async def send(self, data):
        """Sends bytes, and returns how many were taken."""
        return await self._repeat(lambda: self._connection.send(data), self._connection.write_fileno)

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
        await self._repeat(lambda: self._connection.send(message), self._connection.write_fileno)

    async def recv(self):
        """Receives one message."""
        return await self._repeat(self._connection.recv, self._connection.fileno)

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
        connection, _ = await self._repeat(self._connection.accept, self._connection.fileno)
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


class AsyncCallClient:
    """A connection to a server of calls, driven by asyncio. Each call waits in a thread of the event loop's executor."""

    def __init__(self, client, is_called_back=False):
        self._client = client
        self._pool = self._turns = None
        if is_called_back:
            self._pool = concurrent.futures.ThreadPoolExecutor(_TURNS, "pw-called-back")
            self._turns = asyncio.Semaphore(_TURNS)

    async def call(self, method, args=None, timeout=None):
        """Calls a method and waits for its result. A task that is cancelled gives its call up."""
        if self._turns is None:
            return await self._call(method, args, timeout)
        async with self._turns:
            return await self._call(method, args, timeout)

    async def _call(self, method, args, timeout):
        call = await _in_thread(self._client.start, method, args, timeout, pool=self._pool)
        try:
            return await _in_thread(call.result, pool=self._pool)
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def notify(self, method, args=None):
        """Calls a method whose result is not wanted."""
        await _in_thread(self._client.notify, method, args)

    async def allocate(self, size, alignment=1):
        """Allocates memory that is passed to the server without a copy."""
        return await _in_thread(self._client.allocate, size, alignment)

    @property
    def peer(self):
        """Who serves."""
        return self._client.peer

    async def close(self):
        """Closes the connection."""
        await _in_thread(self._client.close)
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        await self.close()


class AsyncCallServer:
    """A service of calls whose functions are coroutines of this event loop."""

    def __init__(self, server):
        self._server = server

    @property
    def clients(self):
        """How many clients are connected."""
        return self._server.clients

    async def close(self):
        """Closes all connections and waits for the calls under way."""
        await _in_thread(self._server.close)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        await self.close()


class AsyncIncomingCall:
    """A call, as the coroutine function sees it that executes it."""

    def __init__(self, call, orders):
        self._call = call
        self._orders = orders

    @property
    def args(self):
        """The arguments. They are the client's to change once the function has returned."""
        return self._call.args

    @property
    def method(self):
        """The number of the method."""
        return self._call.method

    @property
    def peer(self):
        """Who calls."""
        return self._call.peer

    def follow(self, address, size):
        """`size` bytes at an address of the client's."""
        return self._call.follow(address, size)

    def allocate(self, size, alignment=1):
        """Allocates memory for a result that the client reads in place."""
        return self._call.allocate(size, alignment)

    async def call_back(self, method, args=None, timeout=None):
        """Calls a function of the client while the client waits for this call, and waits for its result."""
        result = concurrent.futures.Future()

        def execute():
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(self._call.call_back(method, args, timeout))
                except BaseException as raised:
                    result.set_exception(raised)

        if not self._orders.put(execute):
            raise CallRefused("the function has returned, so its call cannot call back")
        return await asyncio.wrap_future(result)


class _Orders:
    """What a function asks the thread that serves its client to execute."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False

    def put(self, order):
        """Returns `False` if the thread executes nothing more."""
        with self._lock:
            if not self._is_over:
                self._queue.put(order)
            return not self._is_over

    def get(self, timeout):
        return self._queue.get(timeout=timeout)

    def end(self):
        """Executes what is left, and nothing more."""
        with self._lock:
            self._is_over = True
        while not self._queue.empty():
            order = self._queue.get_nowait()
            if order is not None:
                order()


def _run_in(loop, function):
    def serve(call):
        # The thread that serves the client waits for the coroutine, and calls back for it.
        orders = _Orders()
        future = asyncio.run_coroutine_threadsafe(function(AsyncIncomingCall(call, orders)), loop)
        future.add_done_callback(lambda _: orders.put(None))
        while True:
            try:
                order = orders.get(timeout=1)
            except queue.Empty:
                # A loop that is closed executes nothing more.
                if loop.is_closed():
                    raise RuntimeError("the event loop was closed before the function returned") from None
                continue
            if order is None:
                orders.end()
                return future.result()
            order()

    return serve


def _in_this_loop(methods):
    loop = asyncio.get_running_loop()
    return {name: _run_in(loop, function) for name, function in methods.items()}


async def connect_calls(domain, target, methods=None, **options):
    """Connects to `DOMAIN:SERVICE`, a service of calls. The server may call the coroutine functions of a dictionary back."""
    methods = _in_this_loop(methods or {})
    return AsyncCallClient(await _in_thread(domain.connect_calls, target, methods, **options), bool(methods))


async def serve_calls(domain, service, methods, **options):
    """Offers coroutine functions as a service of calls: a dictionary of them by their names or numbers."""
    return AsyncCallServer(await _in_thread(domain.serve_calls, service, _in_this_loop(methods), **options))
