"""A random sequence of calls on UDP sockets that split and join datagrams, and what each of them gives: the same with the library as
without it.

Usage: segments.py SEED STEPS

A receiver with UDP_GRO may get datagrams joined or not, as it happens. So what it gets is taken apart by the length that comes beside it.
"""

import errno
import random
import socket
import struct
import sys

SEED, STEPS = int(sys.argv[1]), int(sys.argv[2])
UDP, SEGMENT, GRO = 17, 103, 104
rng = random.Random(SEED)
# How often a call receives depends on what was joined.
rooms = random.Random(SEED)
# What waits at most: less than any queue drops.
MOST_BYTES, MOST = 60_000, 70

six = SEED % 3 == 2
host = "::1" if six else "127.0.0.1"


class End:
    """A socket, and what waits for it."""

    def __init__(self, name):
        self.name = name
        self.socket = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 3_000))
        self.address = self.socket.getsockname()
        self.segment = 0
        self.joins = False
        self.bytes = self.count = 0


def attempt(what):
    try:
        return what()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def digest(data):
    return f"{len(data)}:{sum(data) & 0xffff}:{data[:4].hex()}"


a, b = End("A"), End("B")
serial = 0


def send(end):
    global serial
    to = b if end is a else a
    serial += 1
    segment = rng.choice([None, None, 0, 1, 100, 500, 1200, 1400, 9000, 65000, 65535])
    size = rng.choice([0, 1, 4, 99, 100, 101, 1200, 2400, 3000, 6400, 9000, 20000, 40000, 65507, 65508, 65600])
    if rng.random() < 0.3:
        size = 64 * rng.choice([1, 100, 500]) + rng.choice([-1, 0, 1])
    effective = end.segment if segment is None else segment
    # Where kernels differ in how many segments they take.
    if effective and not size <= 64 * effective and size <= 129 * effective:
        return "depends"
    pieces = -(-size // effective) if effective else 1
    if to.bytes + size > MOST_BYTES or to.count + pieces > MOST:
        return "full"
    data = (struct.pack("<I", serial) + rng.randbytes(max(0, size - 4)))[:size]
    control = [] if segment is None else [(UDP, SEGMENT, struct.pack("H", segment))]
    if rng.random() < 0.05:
        control = rng.choice([[(UDP, SEGMENT, struct.pack("I", 100))], [(UDP, 99, struct.pack("H", 100))],
                              [(UDP, SEGMENT, struct.pack("H", 100))] * 2,
                              [(socket.IPPROTO_IPV6, 67, struct.pack("i", 4)) if six
                               else (socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", 4))]])
        if control[0][1] == SEGMENT and len(control) == 2 and not 0 <= size <= 6400:
            return "full"
    how = rng.randrange(3)
    cut = rng.randrange(len(data) + 1)
    if control or how == 0:
        result = attempt(lambda: end.socket.sendmsg([data[:cut], data[cut:]], control, 0, to.address))
    else:
        result = attempt(lambda: end.socket.sendto(data, to.address))
    if result == len(data):
        to.bytes += size
        to.count += max(pieces, 1)
    return f"{size} by {segment} of {end.segment} {control if len(control) != 1 else ''} {result}"


def split(data, control):
    size = next((struct.unpack("i", value)[0] for level, kind, value in control if (level, kind) == (UDP, GRO)), 0)
    if not size:
        return [digest(data)]
    assert all(kind == GRO for _, kind, _ in control), control
    return [digest(data[at:at + size]) for at in range(0, len(data), size)]


def receive_all(end):
    got = []
    while True:
        room = rooms.choice([64, 64, 24, 20]) if end.joins else rooms.choice([0, 64])
        one = attempt(lambda: end.socket.recvmsg(65536, room, socket.MSG_DONTWAIT))
        if isinstance(one, str):
            break
        data, control, flags, source = one
        assert flags == 0 and source[1] == (b if end is a else a).address[1], (flags, source)
        got += split(data, control)
    end.bytes = end.count = 0
    return f"{got} {one}"


def receive(end):
    if end.joins:
        return receive_all(end)
    how = rng.randrange(3)
    size = rng.choice([1, 100, 65536])
    if how == 0:
        return attempt(lambda: digest(end.socket.recv(size)))
    flags = rng.choice([0, socket.MSG_PEEK, socket.MSG_DONTWAIT])
    def one():
        data, control, out, _ = end.socket.recvmsg(size, 64, flags)
        return f"{digest(data)} {control} {out:#x}"
    return attempt(one)


def option(end):
    if rng.random() < 0.5:
        size = rng.choice([0, 0, 100, 1000, 1400, 70000])
        result = attempt(lambda: end.socket.setsockopt(UDP, SEGMENT, size))
        end.segment = end.socket.getsockopt(UDP, SEGMENT)
        return f"segment {size} {result} {end.segment}"
    # What waits is joined or not by the option as it was.
    before = receive_all(end)
    end.joins = rng.random() < 0.5
    end.socket.setsockopt(UDP, GRO, int(end.joins))
    return f"joins {end.joins}, before: {before}"


for step in range(STEPS):
    end = rng.choice([a, b])
    act = rng.choices([send, receive, receive_all, option], [50, 30, 12, 2])[0]
    print(step, end.name, act.__name__, act(end), flush=True)
for end in (a, b):
    print("end", end.name, receive_all(end))
