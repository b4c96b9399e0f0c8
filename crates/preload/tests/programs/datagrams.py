"""A random sequence of calls on UDP sockets, and what each of them gives: the same with the library as without it.

Usage: datagrams.py SEED STEPS
"""

import array
import errno
import fcntl
import random
import select
import socket
import struct
import sys
import termios

SEED, STEPS = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(SEED)
# What waits in a queue at most: less than any queue drops.
MOST_BYTES, MOST = 100_000, 20


class End:
    """A socket, and how much waits for it."""

    def __init__(self, name, six):
        self.name, self.six = name, six
        self.open()

    def open(self):
        family = socket.AF_INET6 if self.six else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        host = rng.choice(["::1", "::"] if self.six else ["127.0.0.1", ""])
        self.socket.bind((host, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 3_000))
        self.port = self.socket.getsockname()[1]
        self.waiting = []
        self.remote = None
        self.sender = None

    def address(self):
        return ("::1", self.port) if self.six else ("127.0.0.1", self.port)


def name_of(address):
    """An address without its port, which differs from run to run."""
    if not address:
        return repr(address)
    port = next((end.name for end in ends if end.port == address[1]), "?")
    return f"{address[0]} {port} {address[2:]}"


def attempt(what):
    try:
        return what()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def digest(data):
    return f"{len(data)}:{sum(data) & 0xffff}:{data[:4].hex()}"


six = SEED % 3 == 2
ends = [End("A", six), End("B", six), End("C", six)]
serial = 0


def payload():
    global serial
    serial += 1
    size = rng.choice([0, 1, 4, 7, 8, 14, 100, 1000, 1472, 9000, 60000, 65600])
    return (struct.pack("<I", serial) + rng.randbytes(max(0, size - 4)))[:size]


def accepts(to, sender):
    return to.remote is None or to.remote is sender


def send(end):
    to = rng.choice([other for other in ends if other is not end])
    if end.remote is not None and rng.random() < 0.6:
        to = end.remote
    data = payload()
    if to.waiting and to.sender is not end:
        # The order is kept of each sender, and not among them.
        return "another's turn"
    to.sender = end
    if len(to.waiting) >= MOST or sum(to.waiting) + len(data) > MOST_BYTES:
        return "full"
    how = rng.randrange(4)
    if how == 0 and end.remote is to:
        result = attempt(lambda: end.socket.send(data))
    elif how == 1:
        cut = rng.randrange(len(data) + 1)
        result = attempt(lambda: end.socket.sendmsg([data[:cut], data[cut:]], [], 0, to.address()))
    else:
        result = attempt(lambda: end.socket.sendto(data, rng.choice([0, socket.MSG_DONTWAIT]), to.address()))
    if result == len(data) and accepts(to, end):
        to.waiting.append(len(data))
    return f"to {to.name} {result}"


def receive(end):
    how = rng.randrange(6)
    size = rng.choice([1, 4, 100, 2000, 65536, 65536, 65536])
    flags = rng.choice([0, 0, 0, socket.MSG_DONTWAIT, socket.MSG_PEEK, socket.MSG_TRUNC])
    before = len(end.waiting)

    def took(data):
        if not flags & socket.MSG_PEEK and end.waiting:
            end.waiting.pop(0)
        return data

    if how == 0:
        result = attempt(lambda: digest(took(end.socket.recv(size, flags & ~socket.MSG_TRUNC))))
    elif how == 1:
        def one():
            data, control, out, source = end.socket.recvmsg(size, 64, flags & ~socket.MSG_TRUNC)
            return f"{digest(took(data))} {control} {out:#x} {name_of(source)}"
        result = attempt(one)
    elif how == 2:
        def into():
            buffer = bytearray(size)
            n, source = end.socket.recvfrom_into(buffer, size, flags)
            return f"{n} {digest(took(buffer[:min(n, size)]))} {name_of(source)}"
        result = attempt(into)
    else:
        def plain():
            data, source = end.socket.recvfrom(size, flags & ~socket.MSG_TRUNC)
            return f"{digest(took(data))} {name_of(source)}"
        result = attempt(plain)
    return f"{how} {size} {flags:#x} of {before}: {result}"


def drain(end):
    got = []
    while True:
        data = attempt(lambda: end.socket.recvfrom(65536, socket.MSG_DONTWAIT))
        if isinstance(data, str):
            break
        got.append(f"{digest(data[0])} {name_of(data[1])}")
    end.waiting.clear()
    return f"{got} {data}"


def readiness(end):
    how = rng.randrange(3)
    timeout = rng.choice([0, 0, 0.002])
    if how == 0:
        poll = select.poll()
        for one in ends:
            poll.register(one.socket, select.POLLIN | rng.choice([0, select.POLLOUT]))
        # By descriptor number: as they were opened.
        numbers = {one.socket.fileno(): one.name for one in ends}
        return f"poll {sorted((numbers[fd], what) for fd, what in poll.poll(timeout * 1000))}"
    if how == 1:
        sockets = [one.socket for one in ends]
        r, w, _ = select.select(sockets, rng.choice([[], sockets]), [], timeout)
        names = {one.socket: one.name for one in ends}
        return f"select {[names[one] for one in r]} {[names[one] for one in w]}"
    number = array.array("i", [-1])
    fcntl.ioctl(end.socket, termios.FIONREAD, number)
    return f"FIONREAD {number[0]}"


def reconnect(end):
    to = rng.choice([None] + [other for other in ends if other is not end])
    # Where the kernel's queue still has something from others is not what is compared here.
    before = drain(end)
    if to is None:
        # Python has no way to take a connection away.
        return f"drained {before}"
    end.socket.connect(to.address())
    end.remote = to
    return f"drained {before}, to {to.name}"


def unusual(end):
    option = rng.choice(["pktinfo", "recvttl", "dup", "reopen", "nonblocking"])
    # What lies there already was sent to the socket as it was.
    drain(end)
    if option == "pktinfo" and not six:
        end.socket.setsockopt(socket.IPPROTO_IP, 8, 1)
    elif option == "recvttl" and not six:
        end.socket.setsockopt(socket.IPPROTO_IP, 12, 1)
    elif option == "dup":
        other = end.socket.dup()
        end.socket.close()
        end.socket = other
    elif option == "nonblocking":
        end.socket.setblocking(rng.random() < 0.5)
    else:
        for one in ends:
            drain(one)
        end.socket.close()
        for one in ends:
            if one.remote is end:
                one.socket.close()
                one.open()
        end.open()
    return option


for step in range(STEPS):
    end = rng.choice(ends)
    act = rng.choices([send, receive, readiness, drain, reconnect, unusual], [50, 42, 12, 2, 0.6, 0.5])[0]
    print(step, end.name, act.__name__, act(end), flush=True)
for end in ends:
    print("end", end.name, drain(end))
