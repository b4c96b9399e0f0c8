"""Two programs that speak UDP, for the tests of datagrams.

Usage: datagram_peers.py ROLE PORT [COUNT]
  echo      answers each datagram to where it is from; says "ready"
  connected the same over a socket that is connected to the first that sends
  ping      sends COUNT datagrams, each after the answer to the last, and checks the answers; says how many, and ends with its input
  endless   ping that goes on until a line comes on its input, and then sends COUNT datagrams more
  epoll     echo that waits in epoll; the socket blocks, and is read once each time
  edge      the same by edges: the socket does not block, and is read until there is nothing
  exclusive echo that waits in epoll with EPOLLEXCLUSIVE
  group     echo that waits in epoll, on a socket with SO_REUSEPORT
  steered   the same; a program chooses the first socket of the group for all datagrams
  threads   the same by level, in three threads that wait in one set
  nested    echo that waits in epoll, and in a set within a set once it has received "nest"
  once      echo that is told once, and arms itself again
  pool      the same in three threads that wait in one set; each event is for one of them, and for one datagram at least
  copied    echo in epoll, registered under a descriptor that is closed while a copy is open
  parent    echo whose child has the socket for a while, and does nothing with it
  child     echo in a child, whose parent has closed the socket and waits
  passed    echo whose child has passed the socket on, and has ended
  both      echo in a child and in its parent, which take datagrams from one socket
  lazy      ping that pauses for all sorts of times before it asks
  select    echo that waits in select
  flood     sends COUNT numbered datagrams as fast as it can, then says "sent", and says it to the other end until that has gone
  sink      receives numbered datagrams until it is told that it was all; says how many, and whether their order was kept
  refused   pings until an error comes, and says which
"""

import ctypes
import errno
import os
import random
import select
import socket
import struct
import sys
import threading
import time

role, port = sys.argv[1], int(sys.argv[2])
count = int(sys.argv[3]) if len(sys.argv) > 3 else 0
# Where the server is. It may bind a wildcard instead.
at = os.environ.get("PEERS_AT", "127.0.0.1")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def say(text):
    print(text, flush=True)


def body(i):
    return struct.pack("<I", i) + bytes([i & 0xff]) * (i * 37 % 1400)


if role not in ("ping", "endless", "lazy", "flood", "refused"):
    if role in ("group", "steered"):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind((os.environ.get("PEERS_BIND", at), port))
    if role == "steered":
        # SO_ATTACH_REUSEPORT_CBPF, and "return 0".
        code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        s.setsockopt(socket.SOL_SOCKET, 51, struct.pack("HP", 1, ctypes.addressof(code)))
    if role not in ("group", "steered"):
        say("ready")
if role in ("parent", "child", "passed", "both"):
    # A first datagram, before the fork.
    s.sendto(*s.recvfrom(65536))
    ours, theirs = socket.socketpair()
    child = os.fork()
    if role == "passed" and child == 0:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", s.fileno()))])
        os._exit(0)
    if role == "parent" and child == 0:
        time.sleep(0.2)
        os._exit(0)
    if role == "child" and child != 0:
        s.close()
        os.waitpid(child, 0)
        sys.exit()
    if child == 0:
        # Its parent is killed when the test is over.
        ctypes.CDLL(None).prctl(1, 9)
    if role in ("parent", "passed"):
        for _ in range(30):
            s.sendto(*s.recvfrom(65536))
        os.waitpid(child, 0)
    while True:
        s.sendto(*s.recvfrom(65536))
elif role == "echo":
    recvfrom = ctypes.CDLL(None, use_errno=True).recvfrom
    room = ctypes.create_string_buffer(64)
    while True:
        # An address without its length is a fault of the program's, which the call reports.
        assert recvfrom(s.fileno(), room, 64, socket.MSG_PEEK | socket.MSG_DONTWAIT, room, None) == -1
        assert ctypes.get_errno() in (errno.EFAULT, errno.EAGAIN)
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role == "connected":
    data, source = s.recvfrom(65536)
    s.connect(source)
    s.send(data)
    while True:
        s.send(s.recv(65536))
elif role in ("epoll", "exclusive", "group", "steered"):
    e = select.epoll()
    e.register(s, select.EPOLLIN | (select.EPOLLEXCLUSIVE if role == "exclusive" else 0))
    if role in ("group", "steered"):
        # Not before it is published.
        say("ready")
    while True:
        e.poll()
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role == "edge":
    s.setblocking(False)
    e = select.epoll()
    e.register(s, select.EPOLLIN | select.EPOLLET)
    while True:
        e.poll()
        try:
            while True:
                data, source = s.recvfrom(65536)
                s.sendto(data, source)
        except BlockingIOError:
            pass
elif role == "threads":
    s.setblocking(False)
    e = select.epoll()
    e.register(s, select.EPOLLIN)

    def serve():
        while True:
            e.poll()
            try:
                data, source = s.recvfrom(65536)
                s.sendto(data, source)
            except BlockingIOError:
                pass

    for _ in range(2):
        threading.Thread(target=serve).start()
    serve()
elif role == "nested":
    inner, outer = select.epoll(), select.epoll()
    inner.register(s, select.EPOLLIN)
    is_nested = False
    while True:
        if is_nested:
            outer.poll()
        if not inner.poll(0 if is_nested else -1):
            continue
        data, source = s.recvfrom(65536)
        if data == b"nest":
            outer.register(inner, select.EPOLLIN)
            is_nested = True
        s.sendto(data, source)
elif role == "once":
    e = select.epoll()
    e.register(s, select.EPOLLIN | select.EPOLLONESHOT)
    while True:
        e.poll()
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
        e.modify(s, select.EPOLLIN | select.EPOLLONESHOT)
elif role == "pool":
    s.setblocking(False)
    e = select.epoll()
    e.register(s, select.EPOLLIN | select.EPOLLONESHOT)
    handlers = []
    # Otherwise an exception ends its thread alone.
    threading.excepthook = lambda _: os.abort()

    def answer():
        data, source = s.recvfrom(65536)
        s.sendto(data, source)

    def handle():
        while True:
            if e.poll() != [(s.fileno(), select.EPOLLIN)]:
                os.abort()
            handlers.append(1)
            if len(handlers) != 1:
                os.abort()
            try:
                answer()
            except BlockingIOError:
                # There must be one, though the broker may have to prove again whose it is.
                if not select.select([s], [], [], 60)[0]:
                    os.abort()
                answer()
            try:
                for _ in range(random.choice((0, 0, 0, 4))):
                    answer()
            except BlockingIOError:
                pass
            handlers.pop()
            e.modify(s, select.EPOLLIN | select.EPOLLONESHOT)

    for _ in range(2):
        threading.Thread(target=handle).start()
    handle()
elif role == "copied":
    e = select.epoll()
    e.register(s, select.EPOLLIN)
    served = 0
    while True:
        e.poll()
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
        served += 1
        if served == 2000:
            # The kernel's set has it still.
            copy = os.dup(s.fileno())
            s.close()
            s = socket.socket(fileno=copy)
elif role == "select":
    s.setblocking(False)
    while True:
        select.select([s], [], [])
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role in ("ping", "endless"):
    s.settimeout(100)

    def ping(i):
        s.sendto(body(i), (at, port))
        data, source = s.recvfrom(65536)
        assert data == body(i) and source == (at, port), (i, data[:4], source)

    while role == "endless" and not select.select([sys.stdin], [], [], 0)[0]:
        for i in range(100):
            ping(i)
    for i in range(count):
        ping(i)
    say(f"answered {count}")
    sys.stdin.read()
elif role == "lazy":
    s.settimeout(100)
    pauses = random.Random(1)
    for i in range(count):
        if pauses.random() < 0.3:
            time.sleep(pauses.choice((0.00002, 0.00005, 0.0002, 0.002)))
        s.sendto(body(i), (at, port))
        data, source = s.recvfrom(65536)
        assert data == body(i) and source == (at, port), (i, data[:4], source)
    say(f"answered {count}")
elif role == "flood":
    s.connect((at, port))
    for i in range(count):
        s.send(body(i))
    say("sent")
    try:
        while True:
            s.send(struct.pack("<I", 0xffffffff))
            time.sleep(0.02)
    except ConnectionRefusedError:
        pass
elif role == "sink":
    s.settimeout(100)
    got, last, well = 0, -1, True
    while True:
        data = s.recvfrom(65536)[0]
        i = struct.unpack("<I", data[:4])[0]
        if i == 0xffffffff:
            break
        well &= i > last and data == body(i)
        got, last = got + 1, i
    say(f"{got} {'well' if well else 'wrong'}")
elif role == "refused":
    s.connect((at, port))
    s.settimeout(5)
    i = 0
    try:
        while True:
            s.send(body(i))
            s.recv(65536)
            i += 1
            if i == 2000:
                say("busy")
    except OSError as error:
        say(errno.errorcode.get(error.errno, repr(error)))
