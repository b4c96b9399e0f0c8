"""What the installed package promises. tests/wheel.rs runs this in a fresh environment, with a broker in $PARTYWALL_BROKER."""

import ast
import asyncio
import contextlib
import ctypes
import importlib.resources
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

import partywall
from partywall import aio

# Only a guard against hanging.
GUARD = 60.0


def echo(stream):
    with stream:
        while data := stream.recv(65536):
            stream.sendall(data)


def regions():
    """The regions that this process has mapped: the flags of each header by its address (protocol M5)."""
    found = {}
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            places, access, offset = line.split()[:3]
            if "memfd:partywall" in line and access[0] == "r" and int(offset, 16) == 0:
                place = int(places.partition("-")[0], 16)
                memory.seek(place)
                header = memory.read(40)
                if header[:8] == b"PARTYWAL":
                    found[place] = int.from_bytes(header[32:36], "little")
    return found


class Streams(unittest.TestCase):
    def test_stream_echoes_through_broker(self):
        with partywall.Domain("web") as web, web.listen("echo") as listener:
            listener.settimeout(GUARD)
            with web.connect("web:echo") as client:
                server, peer = listener.accept()
                self.assertEqual((peer.domain, peer.service, peer.pid), ("web", "echo", os.getpid()))
                self.assertEqual(client.peer.domain, "web")
                self.assertEqual(server.channel_id, client.channel_id)
                thread = threading.Thread(target=echo, args=(server,))
                thread.start()
                client.settimeout(GUARD)
                client.sendall(b"hello")
                client.shutdown(socket.SHUT_WR)
                self.assertEqual(client.recv(100), b"hello")
                self.assertEqual(client.recv(100), b"")
                thread.join()

    def test_buffers_of_any_kind_are_sent_and_filled(self):
        a, b = partywall.pair(ring=1 << 20)
        with a, b:
            self.assertEqual(a.send(memoryview(b"--abc--")[2:5]), 3)
            a.sendall(bytearray(b"def"))
            buffer = bytearray(10)
            self.assertEqual(b.recv_into(memoryview(buffer)[1:], 4), 4)
            self.assertEqual(b.recv_into(buffer), 2)
            self.assertEqual(bytes(buffer), b"efbcd" + bytes(5))
            for bad in (b"read-only", memoryview(bytearray(10))[::2]):
                with self.assertRaises((partywall.Invalid, BufferError)):
                    b.recv_into(bad)
            with self.assertRaises(TypeError):
                a.send("text")

    def test_more_than_a_ring_passes_between_threads(self):
        a, b = partywall.pair(ring=4096)
        data = bytes(range(256)) * 4096
        thread = threading.Thread(target=echo, args=(b,))
        thread.start()
        writer = threading.Thread(target=lambda: (a.sendall(data), a.shutdown(socket.SHUT_WR)))
        writer.start()
        with a.makefile("rb") as file:
            self.assertEqual(file.read(), data)
        writer.join()
        thread.join()
        a.close()

    def test_makefile_reads_and_writes_lines(self):
        a, b = partywall.pair()
        with a, b, a.makefile("rw") as here, b.makefile("rw") as there:
            here.write("Grüße\nsecond\n")
            here.flush()
            self.assertEqual(there.readline(), "Grüße\n")
            self.assertEqual(there.readline(), "second\n")

    def test_sleeps_often_asks_for_fences(self):
        # A kernel or a sandbox without this call has fences everywhere: MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED.
        number = {"x86_64": 324, "aarch64": 283, "riscv64": 283}[os.uname().machine]
        has_membarrier = ctypes.CDLL(None).syscall(number, 4, 0, 0) == 0
        for options, asymmetric in (({}, has_membarrier), ({"sleeps_often": True}, False)):
            before = regions()
            a, b = partywall.pair(**options)
            with a, b:
                made = [flags & 1 for place, flags in regions().items() if place not in before]
            self.assertGreaterEqual(len(made), 2)
            self.assertEqual(set(made), {int(asymmetric)}, options)

    def test_outcomes_are_exceptions_of_their_own_kind(self):
        a, b = partywall.pair(ring=4096)
        b.setblocking(False)
        with self.assertRaises(partywall.Empty) as empty:
            b.recv(1)
        self.assertIsInstance(empty.exception, BlockingIOError)
        b.settimeout(0.005)
        with self.assertRaises(partywall.TimedOut) as late:
            b.recv(1)
        self.assertIsInstance(late.exception, TimeoutError)
        a.setblocking(False)
        a.sendall(bytes(4096))
        with self.assertRaises(partywall.Full):
            a.send(b"x")
        b.close()
        with self.assertRaises(BrokenPipeError):
            a.send(b"x")
        with self.assertRaises(partywall.Closed):
            b.recv(1)
        self.assertEqual(b.fileno(), -1)
        a.close()
        with partywall.Domain("web") as web:
            with self.assertRaises(partywall.NotFound) as missing:
                web.connect("web:nothing")
            self.assertIsInstance(missing.exception, partywall.Refused)
            with self.assertRaises(partywall.Invalid):
                web.connect("nothing")
            with self.assertRaises(TypeError):
                web.connect("web:nothing", rings=1)
            with web.listen("echo"), self.assertRaises(partywall.InUse):
                web.listen("echo")
        with self.assertRaisesRegex(partywall.NoBroker, "partywalld"):
            partywall.Domain("web", broker="/nonexistent/broker.sock")
        with self.assertRaises(partywall.Closed):
            web.connect("web:echo")

    def test_selector_reports_data_and_room(self):
        a, b = partywall.pair(ring=4096)
        with a, b, selectors.DefaultSelector() as selector:
            a.setblocking(False)
            b.setblocking(False)
            with self.assertRaises(partywall.Empty):
                b.recv(1)
            selector.register(b, selectors.EVENT_READ)
            self.assertEqual(selector.select(0), [])
            a.send(bytes(4096))
            self.assertTrue(selector.select(GUARD))
            selector.unregister(b)
            with self.assertRaises(partywall.Full):
                a.send(b"x")
            selector.register(a.write_fileno(), selectors.EVENT_READ)
            self.assertEqual(len(b.recv(4096)), 4096)
            self.assertTrue(selector.select(GUARD))
            self.assertEqual(a.send(b"x"), 1)

    def test_sendall_past_time_out_raises_timed_out(self):
        a, b = partywall.pair(ring=4096)
        with a, b:
            a.settimeout(0.001)
            with self.assertRaises(partywall.TimedOut):
                a.sendall(bytes(100_000))

    def test_sendall_to_slow_reader_keeps_its_time_out(self):
        a, b = partywall.pair(ring=65536)

        def drain():
            while b.recv(65536):
                time.sleep(0.001)

        thread = threading.Thread(target=drain)
        thread.start()
        a.settimeout(0.3)
        try:
            with self.assertRaises(partywall.TimedOut):
                a.sendall(bytes(200_000_000))
        finally:
            a.close()
            thread.join(GUARD)
            b.close()

    def test_waiting_thread_leaves_the_interpreter_to_others(self):
        a, b = partywall.pair()
        got = []
        thread = threading.Thread(target=lambda: got.append(b.recv(10)))
        thread.start()
        time.sleep(0.05)
        a.send(b"late")
        thread.join(GUARD)
        self.assertEqual(got, [b"late"])

    def test_close_in_another_thread_ends_a_wait(self):
        a, b = partywall.pair()
        failures = []

        def wait():
            try:
                b.recv(10)
            except partywall.Closed as e:
                failures.append(e)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        b.close()
        thread.join(GUARD)
        self.assertEqual(len(failures), 1)
        a.close()

    def test_signal_handler_interrupts_a_wait(self):
        a, b = partywall.pair()

        class Alarm(Exception):
            pass

        def ring(*_):
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        try:
            with self.assertRaises(Alarm):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                b.recv(1)
        finally:
            signal.signal(signal.SIGALRM, before)
        a.send(b"x")
        self.assertEqual(b.recv(1), b"x")


class Messages(unittest.TestCase):
    def test_messages_arrive_whole(self):
        with partywall.Domain("web") as web, web.listen_messages("orders") as listener:
            listener.settimeout(GUARD)
            client = web.connect_messages("web:orders", ring=4096)
            server, peer = listener.accept()
            self.assertEqual(peer.service, "orders")
            client.send(b"two apples")
            client.send(b"")
            client.send(memoryview(b"pear"))
            buffer = bytearray(4)
            with self.assertRaises(partywall.TooLarge):
                server.recv_into(buffer)
            self.assertEqual([server.recv(), server.recv()], [b"two apples", b""])
            self.assertEqual((server.recv_into(buffer), buffer), (4, b"pear"))
            with self.assertRaises(partywall.TooLarge):
                client.send(bytes(client.max_message + 1))
            client.setblocking(False)
            client.send(bytes(client.max_message))
            with self.assertRaises(partywall.Full):
                client.send(bytes(100))
            client.finish()
            server.recv()
            with self.assertRaises(partywall.Closed):
                server.recv()
            client.close()
            server.close()


class Asyncio(unittest.TestCase):
    def test_many_echoes_run_in_one_thread(self):
        async def serve(listener):
            async for stream in listener:
                asyncio.ensure_future(answer(stream))

        async def answer(stream):
            async with stream:
                while data := await stream.recv(65536):
                    await stream.sendall(data)

        async def visit(domain, number):
            async with await aio.connect(domain, "web:echo", ring=4096) as stream:
                data = bytes([number]) * 100_000
                sender = asyncio.ensure_future(stream.sendall(data))
                got = b""
                while len(got) < len(data):
                    got += await stream.recv(65536)
                await sender
                return got == data

        async def main():
            with partywall.Domain("web") as web:
                async with await aio.listen(web, "echo", ring=4096) as listener:
                    server = asyncio.ensure_future(serve(listener))
                    results = await asyncio.gather(*(visit(web, n) for n in range(20)))
                    server.cancel()
                    return results

        self.assertEqual(asyncio.run(asyncio.wait_for(main(), GUARD)), [True] * 20)

    def test_cancelled_receive_loses_no_message(self):
        async def main():
            with partywall.Domain("web") as web:
                async with await aio.listen_messages(web, "orders") as listener:
                    async with await aio.connect_messages(web, "web:orders") as client, await listener.accept() as server:
                        with self.assertRaises(asyncio.TimeoutError):
                            await asyncio.wait_for(server.recv(), 0.01)
                        await client.send(b"pear")
                        self.assertEqual(await server.recv(), b"pear")
                        client.finish()
                        with self.assertRaises(partywall.Closed):
                            await server.recv()

        asyncio.run(asyncio.wait_for(main(), GUARD))

    def test_close_ends_wait_of_another_task_and_frees_its_descriptor(self):
        async def main():
            with partywall.Domain("web") as web:
                async with await aio.listen(web, "echo") as listener:
                    for _ in range(3):
                        client, server = await asyncio.gather(aio.connect(web, "web:echo"), listener.accept())
                        waiting = asyncio.ensure_future(server.recv(1))
                        await asyncio.sleep(0)
                        server.close()
                        with self.assertRaises(partywall.Closed):
                            await waiting
                        client.close()
                    # The numbers are those of the connections before.
                    async with await aio.connect(web, "web:echo") as client, await listener.accept() as server:
                        answer = asyncio.ensure_future(client.recv(5))
                        await asyncio.sleep(0)
                        await server.sendall(b"hello")
                        self.assertEqual(await answer, b"hello")

        asyncio.run(asyncio.wait_for(main(), GUARD))


VICTIM = """
import partywall, time
domain = partywall.Domain("grave")
stream, _ = domain.listen("end").accept()
stream.sendall(b"last")
time.sleep(1000)
"""


# Breaks the protocol: overwrites the first page of all memory that it shares. The kernel lets it, as the memory is its own.
LIAR = """
import partywall, time
domain = partywall.Domain("grave")
stream, _ = domain.listen("end").accept()
stream.sendall(b"last")
stream.recv(1)
with open("/proc/self/maps") as maps, open("/proc/self/mem", "r+b", buffering=0) as memory:
    for line in maps:
        if " rw-s " in line and "memfd:" in line:
            memory.seek(int(line.split("-")[0], 16))
            memory.write(bytes([255]) * 4096)
time.sleep(1000)
"""


def connect_when_there(domain, target):
    limit = time.monotonic() + GUARD
    while True:
        try:
            stream = domain.connect(target)
            stream.settimeout(GUARD)
            return stream
        except partywall.NotFound:
            if time.monotonic() > limit:
                raise
            time.sleep(0.005)


class Hostile(unittest.TestCase):
    def test_lying_peer_is_corrupt_and_harms_no_other(self):
        liar = subprocess.Popen([sys.executable, "-c", LIAR])
        try:
            with partywall.Domain("shop") as shop:
                stream = connect_when_there(shop, "grave:end")
                self.assertEqual(stream.recv(10), b"last")
                stream.send(b"x")
                with self.assertRaises(partywall.Corrupt) as corrupt:
                    stream.recv(10)
                self.assertIsInstance(corrupt.exception, ConnectionError)
                stream.close()
                a, b = partywall.pair()
                a.send(b"x")
                self.assertEqual(b.recv(1), b"x")
        finally:
            liar.kill()
            liar.wait()

    def test_killed_peer_is_dead_after_its_last_bytes(self):
        victim = subprocess.Popen([sys.executable, "-c", VICTIM])
        try:
            with partywall.Domain("shop") as shop:
                stream = connect_when_there(shop, "grave:end")
                self.assertEqual(stream.recv(10), b"last")
                victim.kill()
                with self.assertRaises(partywall.Dead) as dead:
                    stream.recv(10)
                self.assertIsInstance(dead.exception, ConnectionAbortedError)
                with self.assertRaises(partywall.Dead):
                    stream.sendall(bytes(1 << 20))
                stream.close()
        finally:
            victim.kill()
            victim.wait()

    def test_child_of_a_fork_cannot_use_or_harm_connections(self):
        a, b = partywall.pair()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                a.send(b"x")
            except partywall.Forked:
                a.close()
                b.close()
                code = 0
            os._exit(code)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        a.send(b"y")
        self.assertEqual(b.recv(10), b"y")

    def test_child_of_a_fork_closes_what_a_thread_waits_for(self):
        a, b = partywall.pair()
        a.settimeout(0.002)
        done = threading.Event()

        def wait():
            # Waits this short are in the library, which has the stream's lock then.
            while not done.is_set():
                with contextlib.suppress(partywall.TimedOut):
                    a.recv(1)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    a.close()
                    os._exit(0 if a.fileno() == a.write_fileno() == -1 else 1)
                limit = time.monotonic() + GUARD
                while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < limit:
                    time.sleep(0.001)
                if ended == (0, 0):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                self.assertEqual(ended, (child, 0))
        finally:
            done.set()
            thread.join(GUARD)
            a.close()
            b.close()

    def test_program_that_exits_without_closing_ends_quietly(self):
        program = "import partywall; a, b = partywall.pair(); a.send(b'x'); d = partywall.Domain('web'); l = d.listen('z')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=GUARD)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_wrong_arguments_raise_and_harm_nothing(self):
        a, b = partywall.pair()
        for call in (
            lambda: a.settimeout(-1.0),
            lambda: a.settimeout(float("nan")),
            lambda: a.shutdown(7),
            lambda: a.recv(-1),
            lambda: a.makefile("x"),
            lambda: partywall.pair(ring=1 << 60),
            lambda: partywall.pair(ring=(8192, 4096)),
            lambda: partywall.pair(spin=-1.0),
            lambda: partywall.Domain("no name at all"),
        ):
            with self.assertRaises((ValueError, OverflowError, TypeError, partywall.Error)):
                call()
        a.send(b"x")
        self.assertEqual(b.recv(1 << 40), b"x")


class Guide(unittest.TestCase):
    def test_programs_of_the_guide_echo(self):
        with open(os.environ["PARTYWALL_GUIDE"], encoding="utf-8") as guide:
            blocks = [block.split("```")[0] for block in guide.read().split("```python\n")[1:]]
        server, client, polling, coroutines = (block for block in blocks if block.startswith("import"))
        for program in (server, polling, coroutines):
            with self.subTest(program=program):
                running = subprocess.Popen([sys.executable, "-c", program])
                try:
                    limit = time.monotonic() + GUARD
                    while True:
                        done = subprocess.run([sys.executable, "-c", client], capture_output=True, timeout=GUARD)
                        if done.returncode == 0:
                            break
                        # The server prints nothing, so the client comes again until it is there.
                        self.assertLess(time.monotonic(), limit, done.stderr)
                        self.assertIsNone(running.poll())
                        time.sleep(0.01)
                    self.assertEqual(done.stdout, b"b'hello'\n")
                finally:
                    running.kill()
                    running.wait()


class Stubs(unittest.TestCase):
    def test_stubs_list_what_the_native_part_has(self):
        from partywall import _native

        text = importlib.resources.files("partywall").joinpath("_native.pyi").read_text()
        classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}

        def members(node):
            names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            return names.union(*(members(classes[base.id]) for base in node.bases if base.id in classes), set())

        for name, node in classes.items():
            if name.startswith("_"):
                continue
            native = {member for member in vars(getattr(_native, name)) if not member.startswith("__")}
            stub = {member for member in members(node) if not member.startswith("__")}
            self.assertEqual(native, stub, name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
