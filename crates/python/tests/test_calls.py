"""Calls by the installed package. tests/wheel.rs runs this in a fresh environment, with a broker in $PARTYWALL_BROKER."""

import array
import asyncio
import ctypes
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest

import partywall
from partywall import aio

try:
    import numpy
except ImportError:
    numpy = None

# Only a guard against hanging.
GUARD = 60.0


def total(call):
    return struct.pack("<q", sum(bytes(call.args)))


def list_sum(call):
    """Follows a list in the client's heap: each node is a value and the address of the next node."""
    (address,), result = struct.unpack("<Q", bytes(call.args)), 0
    while address:
        value, address = struct.unpack("<qQ", bytes(call.follow(address, 16)))
        result += value
    return struct.pack("<q", result)


def ones(call):
    (count,) = struct.unpack("<I", bytes(call.args))
    block = call.allocate(8 * count, 64)
    values = memoryview(block).cast("d")
    for i in range(count):
        values[i] = 1.0
    return block


def fail(call):
    raise partywall.ApplicationError(7, "the account is empty")


def mistake(call):
    raise KeyError("a mistake of the test")


METHODS = {
    "null": lambda call: None,
    "echo": lambda call: bytes(call.args),
    "sum": total,
    "list": list_sum,
    "ones": ones,
    "fail": fail,
    "mistake": mistake,
    "refuse": lambda call: (_ for _ in ()).throw(partywall.CallRefused("not today")),
    "text": lambda call: "no bytes",
    7: lambda call: struct.pack("<I", call.method),
}


class World:
    """A domain that serves and calls, with a server of METHODS and others."""

    def __init__(self, **others):
        self.domain = partywall.Domain("web")
        self.server = self.domain.serve_calls("math", METHODS | others)
        self.client = self.domain.connect_calls("web:math")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.client.close()
        self.server.close()
        self.domain.close()


class QuietMistakes:
    """Collects what functions raise that is no outcome of a call."""

    def __enter__(self):
        self.before, sys.unraisablehook = sys.unraisablehook, lambda raised: self.types.append(raised.exc_type)
        self.types = []
        return self

    def __exit__(self, *exception):
        sys.unraisablehook = self.before


class Calls(unittest.TestCase):
    def test_results_of_every_size_come_back(self):
        with World() as world:
            self.assertEqual(bytes(world.client.call("null")), b"")
            for size in (0, 1, 40, 41, 4096, 1 << 20):
                sent = bytes(range(256)) * (size // 256) + bytes(size % 256)
                result = world.client.call("echo", sent)
                self.assertEqual((len(result), bytes(result) == sent), (size, True), size)
            self.assertEqual(bytes(world.client.call(7)), struct.pack("<I", 7))
            self.assertEqual(struct.unpack("<q", bytes(world.client.call("sum", bytearray([2] * 1000)))), (2000,))
            self.assertEqual(world.client.heap_stats()["blocks"], 0)
            self.assertEqual((world.client.peer.domain, world.server.clients), ("web", 1))

    def test_outcomes_are_exceptions_of_their_own_kind(self):
        with World() as world:
            call = world.client.call
            with self.assertRaises(partywall.UnknownMethod):
                call("nothing")
            with self.assertRaises(partywall.ApplicationError) as failed:
                call("fail")
            self.assertEqual((failed.exception.code, failed.exception.message), (7, "the account is empty"))
            with self.assertRaisesRegex(partywall.CallRefused, "not today"):
                call("refuse")
            with QuietMistakes() as mistakes:
                for method in ("mistake", "text"):
                    with self.assertRaises(partywall.FunctionFailed):
                        call(method)
            self.assertEqual(mistakes.types, [KeyError, TypeError])
            with self.assertRaises(partywall.BadPointer):
                call("list", struct.pack("<Q", 64))
            with self.assertRaises(partywall.NotFound):
                world.domain.connect_calls("web:nothing")
            for wrong in (lambda: call(-1), lambda: call("null", "text"), lambda: call("null", b"", -1.0)):
                with self.assertRaises((TypeError, ValueError, OverflowError)):
                    wrong()
            with self.assertRaises(TypeError):
                world.domain.connect_calls("web:math", heaps=1)
            call("null")
            world.client.close()
            with self.assertRaises(partywall.Closed):
                call("null")

    def test_server_that_stops_is_closed_and_says_whether_it_saw_the_call(self):
        with World() as world:
            world.server.close()
            with self.assertRaises(partywall.Closed) as closed:
                world.client.call("null")
            self.assertIs(closed.exception.seen, False)

    def test_blocks_are_memory_that_the_server_reads_in_place(self):
        with World() as world:
            block = world.client.allocate(1 << 20)
            self.assertEqual(len(block), 1 << 20)
            view = memoryview(block)
            self.assertFalse(view.readonly)
            view[:] = bytes([1]) * len(view)
            before = world.client.heap_stats()
            self.assertEqual(struct.unpack("<q", bytes(world.client.call("sum", block))), (1 << 20,))
            self.assertEqual(struct.unpack("<q", bytes(world.client.call("sum", view[: 1 << 10]))), (1 << 10,))
            self.assertEqual(world.client.heap_stats(), before, "no copy was made")
            with self.assertRaises(BufferError):
                block.release()
            with self.assertRaises(BufferError):
                block.resize(10)
            view.release()
            block.resize(10)
            self.assertEqual(bytes(block), bytes([1]) * 10)
            block.release()
            with self.assertRaises(partywall.Closed):
                memoryview(block)
            self.assertEqual(world.client.heap_stats()["blocks"], 0)

    def test_block_lives_as_long_as_a_view_of_it(self):
        with World() as world:
            view = memoryview(world.client.allocate(100))
            gc.collect()
            self.assertEqual(world.client.heap_stats()["blocks"], 1)
            view[99] = 1
            view.release()
            gc.collect()
            self.assertEqual(world.client.heap_stats()["blocks"], 0)

    def test_list_is_followed_at_the_addresses_of_the_client(self):
        with World() as world:
            nodes, address = [], 0
            for value in range(100):
                node = world.client.allocate(16)
                struct.pack_into("<qQ", node, 0, value, address)
                address = node.address
                nodes.append(node)
            self.assertEqual(struct.unpack("<q", bytes(world.client.call("list", struct.pack("<Q", address)))), (4950,))
            # A list that leads back to itself ends at the limit of pointers.
            struct.pack_into("<Q", nodes[0], 8, address)
            with self.assertRaises(partywall.BadPointer):
                world.client.call("list", struct.pack("<Q", address))

    def test_result_in_a_block_is_read_by_copies_or_in_place(self):
        with World() as world:
            with world.client.call("ones", struct.pack("<I", 1000)) as result:
                self.assertEqual(len(result), 8000)
                self.assertEqual(struct.unpack("<d", result.read(7992, 8)), (1.0,))
                part = bytearray(16)
                self.assertEqual(result.readinto(part, 7992), 8)
                for wrong in ((0, 8001), (8001, 0), (1, 1 << 63)):
                    with self.assertRaises(partywall.BadPointer):
                        result.read(*wrong)
                with self.assertRaises(TypeError):
                    memoryview(result)
                in_place = result.trusting()
                self.assertTrue(in_place.readonly)
                self.assertEqual(sum(in_place.cast("d")), 1000.0)
                with self.assertRaises(BufferError):
                    result.release()
                in_place.release()
            with self.assertRaises(partywall.Closed):
                len(result)
            with self.assertRaises(partywall.Closed):
                result.trusting()
            short = world.client.call(7).trusting()
            self.assertEqual(short.tobytes(), struct.pack("<I", 7))

    def test_block_that_is_still_viewed_is_no_result(self):
        kept = []

        def leak(call):
            block = call.allocate(100)
            kept.append(memoryview(block))
            return block

        with World(leak=leak) as world:
            with QuietMistakes() as mistakes, self.assertRaises(partywall.FunctionFailed):
                world.client.call("leak")
            self.assertEqual(mistakes.types, [BufferError])
            kept.clear()

    @unittest.skipIf(numpy is None, "NOT TESTED: arrays without a copy need NumPy")
    def test_arrays_lie_in_heaps_of_both_sides(self):
        def scale(call):
            values = numpy.frombuffer(call.args.trusting(), dtype="f8")
            block = call.allocate(values.nbytes)
            numpy.multiply(values, 2, out=numpy.frombuffer(block, dtype="f8"))
            return block

        with World(scale=scale) as world:
            values = numpy.frombuffer(world.client.allocate(8 << 17), dtype="f8")
            values[:] = numpy.arange(1 << 17)
            before = world.client.heap_stats()
            result = numpy.frombuffer(world.client.call("scale", values).trusting(), dtype="f8")
            self.assertEqual(world.client.heap_stats(), before)
            self.assertTrue(numpy.array_equal(result, values * 2))
            with self.assertRaises(ValueError):
                result[0] = 1

    def test_calls_under_way_are_answered_each_once(self):
        with World() as world:
            calls = [world.client.start("echo", struct.pack("<I", n)) for n in range(1000)]
            for n, call in reversed(list(enumerate(calls))):
                self.assertEqual(bytes(call.result()), struct.pack("<I", n))
            with self.assertRaises(partywall.Invalid):
                calls[0].result()
            call = world.client.start("null")
            call.cancel()
            with self.assertRaises(partywall.Invalid):
                call.result()
            world.client.call("null")

    def test_call_that_takes_too_long_is_timed_out(self):
        wait = threading.Event()
        with World(wait=lambda call: wait.wait(GUARD) and None) as world:
            with self.assertRaises(partywall.TimedOut):
                world.client.call("wait", timeout=0.01)
            wait.set()
            world.client.call("null", timeout=GUARD)

    def test_notices_arrive_in_order(self):
        got, done = [], threading.Event()

        def note(call):
            got.append(struct.unpack("<I", bytes(call.args))[0])
            if len(got) == 3000:
                done.set()

        with World(note=note) as world:
            for n in range(3000):
                world.client.notify("note", struct.pack("<I", n))
            self.assertTrue(done.wait(GUARD))
            self.assertEqual(got, list(range(3000)))

    def test_threads_share_a_client(self):
        with World() as world:
            failures = []

            def visit(number):
                for n in range(200):
                    sent = bytes([number]) * (n % 100)
                    if bytes(world.client.call("echo", sent)) != sent:
                        failures.append((number, n))

            threads = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(GUARD)
            self.assertEqual(failures, [])

    def test_signal_handler_interrupts_a_call(self):
        wait = threading.Event()

        class Alarm(Exception):
            pass

        def ring(*_):
            raise Alarm

        with World(wait=lambda call: wait.wait(GUARD) and None) as world:
            before = signal.signal(signal.SIGALRM, ring)
            try:
                with self.assertRaises(Alarm):
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                    world.client.call("wait")
            finally:
                signal.signal(signal.SIGALRM, before)
                wait.set()
            world.client.call("null")

    def test_function_may_stop_its_own_server(self):
        stopped = threading.Event()
        server = []

        def stop(call):
            server[0].close()
            stopped.set()

        with World(stop=stop) as world:
            server.append(world.server)
            try:
                world.client.call("stop", timeout=GUARD)
            except partywall.Closed:
                pass
            self.assertTrue(stopped.wait(GUARD))


SERVER = """
import partywall, time
domain = partywall.Domain("grave")

def sleep(call):
    print("sleeps", flush=True)
    time.sleep(1000)

server = domain.serve_calls("end", {"echo": lambda call: bytes(call.args), "sleep": sleep})
time.sleep(1000)
"""

LEFT_OPEN = """
import partywall
domain = partywall.Domain("left")
server = domain.serve_calls("open", {"null": lambda call: None})
client = domain.connect_calls("left:open")
client.call("null")
block = client.allocate(100)
view = memoryview(block)
ongoing = client.start("null")
"""

# Calls come until the interpreter ends, so a function may be about to run then.
LEFT_BUSY = """
import partywall, threading, time
domain = partywall.Domain("left")
server = domain.serve_calls("busy", {"null": lambda call: None})

def visit():
    client = domain.connect_calls("left:busy")
    try:
        while True:
            client.call("null")
    except partywall.Error:
        pass

threading.Thread(target=visit, daemon=True).start()
while not server.clients:
    time.sleep(0.001)
time.sleep(0.02)
"""


class Processes(unittest.TestCase):
    def test_killed_server_is_dead_and_had_seen_the_call(self):
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        try:
            with partywall.Domain("shop") as shop:
                limit = time.monotonic() + GUARD
                while True:
                    try:
                        client = shop.connect_calls("grave:end")
                        break
                    except partywall.NotFound:
                        self.assertLess(time.monotonic(), limit)
                        time.sleep(0.005)
                big = bytes(range(256)) * 1000
                self.assertEqual(bytes(client.call("echo", big)), big)
                asleep = client.start("sleep")
                self.assertEqual(server.stdout.readline(), b"sleeps\n")
                # The server executes one call of a client after the other.
                with self.assertRaises(partywall.TimedOut):
                    client.call("sleep", timeout=0.05)
                call = client.start("sleep")
                server.kill()
                for ongoing, seen in [(call, False), (asleep, True)]:
                    with self.assertRaises(partywall.Dead) as dead:
                        ongoing.result()
                    self.assertIs(dead.exception.seen, seen)
                client.close()
        finally:
            server.kill()
            server.communicate()

    def test_program_that_exits_without_closing_ends_quietly(self):
        for program in (LEFT_OPEN, LEFT_BUSY):
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=GUARD)
            self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_child_of_a_fork_cannot_use_or_harm_calls(self):
        with World() as world:
            block = world.client.allocate(100)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    world.client.call("null")
                except partywall.Forked:
                    try:
                        block.release()
                    except partywall.Forked:
                        del block
                        world.client.close()
                        world.server.close()
                        code = 0
                os._exit(code)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(struct.unpack("<q", bytes(world.client.call("sum", block)))[0], sum(memoryview(block)))


class CallsBack(unittest.TestCase):
    def test_server_calls_functions_of_its_client(self):
        def table(call):
            parts = [bytes(call.call_back("part", struct.pack("<I", size))) for size in (0, 40, 41, 100_000)]
            return b"".join(parts) + bytes(call.call_back(9))

        with World(table=table) as world:
            threads = []

            def part(call):
                threads.append(threading.get_ident())
                (size,) = struct.unpack("<I", bytes(call.args))
                return bytes([7] * size)

            def block(call):
                result = call.allocate(1000)
                memoryview(result)[:] = bytes([8] * 1000)
                return result

            with world.domain.connect_calls("web:math", {"part": part, 9: block}) as client:
                self.assertEqual(bytes(client.call("table")), bytes([7] * 100_081) + bytes([8] * 1000))
                call = client.start("table", timeout=GUARD)
                self.assertEqual(len(call.result()), 101_081)
            self.assertEqual(set(threads), {threading.get_ident()}, "the thread that waits executes them")

    def test_outcomes_of_calls_back_are_exceptions_of_their_own_kind(self):
        def ask(call):
            try:
                return bytes(call.call_back(bytes(call.args).decode()))
            except partywall.CallError as error:
                return f"{type(error).__name__} {error}".encode()

        over = threading.Event()

        def wait(call):
            try:
                with self.assertRaises(partywall.TimedOut):
                    call.call_back("wait", timeout=0.01)
                with self.assertRaises(partywall.CallRefused):
                    call.call_back("null")
            finally:
                over.set()

        waits = lambda call: over.wait(GUARD) and None
        methods = {"fail": fail, "mistake": mistake, "null": lambda call: None, "wait": waits}
        with World(ask=ask, wait=wait) as world, world.domain.connect_calls("web:math", methods) as client:
            self.assertIn(b"the account is empty", bytes(client.call("ask", b"fail")))
            self.assertIn(b"UnknownMethod", bytes(client.call("ask", b"nothing")))
            with QuietMistakes() as mistakes:
                self.assertIn(b"FunctionFailed", bytes(client.call("ask", b"mistake")))
            self.assertEqual(mistakes.types, [KeyError])
            self.assertIn(b"CallRefused", bytes(world.client.call("ask", b"null")), "a client without functions")
            client.call("wait")
            with self.assertRaises(TypeError):
                world.domain.connect_calls("web:math", {1.5: fail})

    def test_call_that_is_over_cannot_call_back(self):
        kept = []

        def keep(call):
            kept.append(call)
            return bytes(call.call_back("null"))

        with World(keep=keep) as world, world.domain.connect_calls("web:math", {"null": lambda call: None}) as client:
            client.call("keep")
            with self.assertRaisesRegex(partywall.CallRefused, "has returned"):
                kept[0].call_back("null")

    def test_function_that_is_called_back_cannot_wait_for_its_connection(self):
        with World(ask=lambda call: bytes(call.call_back("enter"))) as world:
            calls, refused = [], []

            def enter(call):
                for wait in (lambda: client.call("null"), lambda: calls[0].result()):
                    with self.assertRaises(partywall.CallRefused):
                        wait()
                    refused.append(wait)
                client.notify("null")
                return b"entered"

            with world.domain.connect_calls("web:math", {"enter": enter}) as client:
                calls.append(client.start("ask"))
                self.assertEqual(bytes(calls[0].result()), b"entered")
            self.assertEqual(len(refused), 2)

    def test_threads_of_the_function_call_back_while_it_runs(self):
        def ask(call):
            results = []
            ask_once = lambda: results.append(bytes(call.call_back("null")))
            threads = [threading.Thread(target=ask_once) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return bytes([len(results)])

        with World(ask=ask) as world, world.domain.connect_calls("web:math", {"null": lambda call: None}) as client:
            self.assertEqual(bytes(client.call("ask")), bytes([4]))


class Asyncio(unittest.TestCase):
    def test_coroutines_call_back_and_are_called_back(self):
        async def ask(call):
            parts = [bytes(await call.call_back("part", bytes([n]))) for n in range(3)]
            with self.assertRaises(partywall.UnknownMethod):
                await call.call_back("nothing")
            return b"".join(parts)

        async def part(call):
            await asyncio.sleep(0.001)
            return bytes(call.args) * 2

        async def main():
            with partywall.Domain("web") as web:
                async with await aio.serve_calls(web, "math", {"ask": ask}):
                    async with await aio.connect_calls(web, "web:math", {"part": part}) as client:
                        results = await asyncio.gather(*(client.call("ask") for _ in range(100)))
                        self.assertEqual([bytes(result) for result in results], [bytes([0, 0, 1, 1, 2, 2])] * 100)

        asyncio.run(asyncio.wait_for(main(), GUARD))

    def test_call_back_after_coroutine_has_returned_is_refused(self):
        later = []

        async def call_back(call):
            await asyncio.sleep(0.05)
            await call.call_back("part", bytes(4))

        async def ask(call):
            later.append(asyncio.ensure_future(call_back(call)))

        async def part(call):
            return bytes(call.args)

        async def main():
            with partywall.Domain("web") as web:
                async with await aio.serve_calls(web, "math", {"ask": ask}):
                    async with await aio.connect_calls(web, "web:math", {"part": part}) as client:
                        await client.call("ask")
                        with self.assertRaises(partywall.CallRefused):
                            await later[0]

        asyncio.run(asyncio.wait_for(main(), GUARD))

    def test_coroutines_serve_and_call(self):
        async def double(call):
            await asyncio.sleep(0.001)
            return array.array("i", [2 * value for value in array.array("i", bytes(call.args))])

        async def main():
            with partywall.Domain("web") as web:
                async with await aio.serve_calls(web, "math", {"double": double}) as server:
                    async with await aio.connect_calls(web, "web:math") as client:
                        sent = [array.array("i", range(n, n + 20)) for n in range(8)]
                        results = await asyncio.gather(*(client.call("double", values) for values in sent))
                        block = await client.allocate(4)
                        ctypes.c_int.from_buffer(block).value = 21
                        self.assertEqual(bytes(await client.call("double", block)), bytes(ctypes.c_int(42)))
                        self.assertEqual(server.clients, 1)
                        return [array.array("i", bytes(result)).tolist() for result in results]

        doubled = [[2 * value for value in range(n, n + 20)] for n in range(8)]
        self.assertEqual(asyncio.run(asyncio.wait_for(main(), GUARD)), doubled)

    def test_cancelled_task_gives_its_call_up(self):
        wait = threading.Event()

        async def main():
            with World(wait=lambda call: wait.wait(GUARD) and None) as world:
                client = aio.AsyncCallClient(world.client)
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.call("wait"), 0.02)
                wait.set()
                self.assertEqual(bytes(await client.call("echo", b"pear")), b"pear")

        asyncio.run(asyncio.wait_for(main(), GUARD))


class Guide(unittest.TestCase):
    def test_programs_of_the_guide_call(self):
        with open(os.environ["PARTYWALL_RPC_GUIDE"], encoding="utf-8") as guide:
            blocks = [block.split("```")[0] for block in guide.read().split("```python\n")[1:]]
        server, client, back = blocks[:3]
        start = "import partywall\ndomain = partywall.Domain('web')\n"
        done = subprocess.run([sys.executable, "-c", start + back], capture_output=True, timeout=GUARD)
        self.assertEqual(done.stdout, b"0\n1\n2\n", done.stderr)
        running = subprocess.Popen([sys.executable, "-c", server])
        try:
            limit = time.monotonic() + GUARD
            while True:
                done = subprocess.run([sys.executable, "-c", client], capture_output=True, timeout=GUARD)
                if done.returncode == 0:
                    break
                self.assertLess(time.monotonic(), limit, done.stderr)
                self.assertIsNone(running.poll())
                time.sleep(0.01)
            self.assertEqual(done.stdout, b"1024.0\n1048576\n")
        finally:
            running.kill()
            running.wait()


if __name__ == "__main__":
    unittest.main(verbosity=2)
