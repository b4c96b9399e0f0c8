"""Talks to an echo on several connections at once, each in its own way, and says what came back. Usage: echo_client.py ADDRESS PORT"""
import asyncio
import hashlib
import random
import selectors
import socket
import sys
import threading

ADDRESS = (sys.argv[1], int(sys.argv[2]))


def noise(seed, size):
    return random.Random(seed).randbytes(size)


async def by_asyncio(seed, rounds):
    reader, writer = await asyncio.open_connection(*ADDRESS)
    heard = hashlib.sha256()
    for i in range(rounds):
        data = noise(seed * 1000 + i, 1 + (seed * 7919 + i * 104729) % 60_000)
        writer.write(data)
        back = await reader.readexactly(len(data))
        assert back == data, f"connection {seed}, round {i}"
        heard.update(back)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    return heard.hexdigest()


async def at_once(count, rounds):
    return await asyncio.gather(*(by_asyncio(seed, rounds) for seed in range(count)))


def by_threads(results, seed, size):
    """One thread writes while another reads the same socket; files on top of it; a timeout that does not strike."""
    with socket.create_connection(ADDRESS, timeout=60) as s:
        data = noise(seed, size)

        def send():
            out = s.makefile("wb")
            for at in range(0, size, 50_000):
                out.write(data[at : at + 50_000])
            out.flush()
            s.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        back = s.makefile("rb").read()
        sender.join()
        assert back == data, f"thread {seed}: {len(back)} of {size}"
        results[seed] = hashlib.sha256(back).hexdigest()


def by_selectors(seed, size):
    """Non-blocking, with a selector, reading into a buffer by pieces."""
    s = socket.create_connection(ADDRESS)
    s.setblocking(False)
    data, sent, back = noise(seed, size), 0, bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while len(back) < size:
            for _, events in selector.select():
                if events & selectors.EVENT_WRITE and sent < size:
                    try:
                        sent += s.send(data[sent : sent + 30_000])
                    except BlockingIOError:
                        pass
                    if sent == size:
                        selector.modify(s, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    try:
                        back += s.recv(7_777)
                    except BlockingIOError:
                        pass
    s.close()
    assert bytes(back) == data
    return hashlib.sha256(back).hexdigest()


for line in asyncio.run(at_once(8, 40)):
    print(line)
results = {}
threads = [threading.Thread(target=by_threads, args=(results, seed, 3_000_000)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for seed in range(4):
    print(results[seed])
print(by_selectors(99, 5_000_000))
