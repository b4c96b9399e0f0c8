"""Uses connections in ways that TCP defines, and prints what each of its two ends sees: half-close, urgent bytes, both directions at once, and
fork. The same lines must come without Partywall.

Usage: conversation.py serve PORT ADDRESSES, and conversation.py call PORT ENOUGH ADDRESS...
The caller opens a connection for each use and address. Both ends echo on all of them until the file ENOUGH is there."""
import array
import errno
import fcntl
import os
import select
import socket
import sys
import threading
import zlib

PIECE = 64
MARK = b"\xff" * PIECE
SIOCATMARK = 0x8905
# Pieces from each of two processes that send at once.
EACH = 30


def noise(seed, size):
    return (bytes((seed + n * n) % 251 for n in range(1009)) * (size // 1009 + 1))[:size]


def digest(data):
    return "%d bytes, %08x" % (len(data), zlib.crc32(data))


def attempt(call):
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno]


def exactly(connection, size):
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the other end has closed after %d of %d bytes" % (len(data), size)
        data += part
    return bytes(data)


def to_the_end(connection):
    data = bytearray()
    while part := connection.recv(30_000):
        data += part
    return bytes(data)


def events(connection, mask, wait):
    poll = select.poll()
    poll.register(connection, mask)
    return [hex(seen) for _, seen in poll.poll(wait)]


def half_close(connection, is_first):
    """The first end sends, ends its direction, and gets an answer that is sent after that."""
    if is_first:
        connection.sendall(noise(1, 200_000))
        connection.shutdown(socket.SHUT_WR)
        yield "sends after its end", attempt(lambda: connection.send(b"x"))
        yield "gets", digest(to_the_end(connection))
        yield "has", events(connection, select.POLLIN | select.POLLRDHUP, 0)
    else:
        yield "gets", digest(to_the_end(connection))
        yield "gets again", connection.recv(1)
        yield "has", events(connection, select.POLLIN | select.POLLOUT | select.POLLRDHUP, 0)
        yield "kernel's state", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        connection.sendall(noise(2, 300_000))


def is_at_mark(connection):
    answer = array.array("i", [0])
    fcntl.ioctl(connection, SIOCATMARK, answer)
    return answer[0]


def urgent(connection, is_first):
    """The first end sends urgent bytes among others. After that both go on."""
    for inline in (False, True):
        if is_first:
            # Only then does the other end take urgent bytes in line.
            exactly(connection, PIECE)
            connection.sendall(b"abc")
            connection.send(b"!", socket.MSG_OOB)
            connection.sendall(b"defg")
            continue
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
        connection.sendall(noise(3, PIECE))
        yield "has", events(connection, select.POLLPRI, None)
        yield "is at the mark", is_at_mark(connection)
        before = b""
        while len(before) < 3:
            # It ends at the mark.
            before += connection.recv(100)
        yield "before", before
        yield "is at the mark", is_at_mark(connection)
        if inline:
            yield "by itself", attempt(lambda: connection.recv(1, socket.MSG_OOB))
            yield "after", exactly(connection, 5)
        else:
            yield "by itself", attempt(lambda: connection.recv(1, socket.MSG_OOB))
            yield "again", attempt(lambda: connection.recv(1, socket.MSG_OOB))
            yield "after", exactly(connection, 4)
    connection.sendall(noise(4, 50_000))
    yield "gets", digest(exactly(connection, 50_000))


def both_at_once(connection, is_first):
    """A thread of each end sends while another one receives."""
    sender = threading.Thread(target=connection.sendall, args=(noise(5 + is_first, 1_000_000),))
    sender.start()
    yield "gets", digest(exactly(connection, 1_000_000))
    sender.join()


def pieces(name, count):
    return [(name + b"%03d" % number).ljust(PIECE, b".") for number in range(count)]


def in_order(got, name, count):
    return [piece for piece in got if piece.startswith(name)] == pieces(name, count)


def fork(connection, is_first):
    """Two processes of the first end use one connection. The child goes on after its parent has closed it."""
    if is_first:
        (hears, tells), (waits, goes_on) = os.pipe(), os.pipe()
        child = os.fork()
        for piece in pieces(b"child" if child == 0 else b"parent", EACH):
            connection.sendall(piece)
        if child == 0:
            got = [exactly(connection, PIECE) for _ in range(10)]
            os.write(tells, b"the first ten" if got == pieces(b"answer", 20)[:10] else repr(got).encode())
            os.read(waits, 1)
            for piece in pieces(b"heir", EACH):
                connection.sendall(piece)
            os._exit(0)
        yield "child gets", os.read(hears, 10_000).decode()
        got = [exactly(connection, PIECE) for _ in range(10)]
        yield "parent gets", "the last ten" if got == pieces(b"answer", 20)[10:] else got
        connection.sendall(b"closed".ljust(PIECE, b"."))
        connection.close()
        os.write(goes_on, b"x")
        yield "child ends", os.waitpid(child, 0)[1]
        for end in (hears, tells, waits, goes_on):
            os.close(end)
    else:
        for piece in pieces(b"answer", 20):
            connection.sendall(piece)
        got = [exactly(connection, PIECE) for _ in range(2 * EACH)]
        yield "gets in order", [in_order(got, name, EACH) for name in (b"child", b"parent")]
        yield "gets", exactly(connection, PIECE).rstrip(b".")
        rest = to_the_end(connection)
        yield "gets of the child", "all" if rest == b"".join(pieces(b"heir", EACH)) else rest


# Which use of a connection, and whether the caller is the first end. Only one process has the connections of the other uses.
USES = [(use, first) for use in (half_close, urgent, both_at_once, fork) for first in (True, False)]


def use_all(connections, calls):
    families = len(connections) // len(USES)
    for at, connection in enumerate(connections):
        use, caller_is_first = USES[at // families]
        for what, seen in use(connection, caller_is_first == calls):
            print("%s %s, %s end: %s: %s" % (use.__name__, at, "first" if caller_is_first == calls else "second", what, seen), flush=True)
        connection.close()


def main():
    port = int(sys.argv[2])
    if sys.argv[1] == "serve":
        with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64) as listener:
            count = int(sys.argv[3]) * len(USES)
            connections = [listener.accept()[0] for _ in range(count)]
        is_last = False
        while not is_last:
            for connection in connections:
                piece = exactly(connection, PIECE)
                connection.sendall(piece)
                is_last = piece == MARK
        return use_all(connections, False)
    connections = [socket.create_connection((address, port)) for _ in USES for address in sys.argv[4:]]
    left = 8
    while left:
        left -= os.path.exists(sys.argv[3])
        piece = noise(left, PIECE) if left else MARK
        for connection in connections:
            connection.sendall(piece)
        for connection in connections:
            assert exactly(connection, PIECE) == piece
    use_all(connections, True)


main()
