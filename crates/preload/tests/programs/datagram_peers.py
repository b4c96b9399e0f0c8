"""Two programs that speak UDP, for the tests of datagrams.

Usage: datagram_peers.py ROLE PORT [COUNT]
  echo      answers each datagram to where it is from; says "ready"
  connected the same over a socket that is connected to the first that sends
  ping      sends COUNT datagrams, each after the answer to the last, and checks the answers; says how many
  epoll     echo that waits in epoll
  select    echo that waits in select
  flood     sends COUNT numbered datagrams as fast as it can, then says "sent"
  sink      receives numbered datagrams until none comes for a second; says how many, and whether their order was kept
  refused   pings until an error comes, and says which
"""

import errno
import select
import socket
import struct
import sys

role, port = sys.argv[1], int(sys.argv[2])
count = int(sys.argv[3]) if len(sys.argv) > 3 else 0
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def say(text):
    print(text, flush=True)


def body(i):
    return struct.pack("<I", i) + bytes([i & 0xff]) * (i * 37 % 1400)


if role in ("echo", "connected", "epoll", "select", "sink"):
    s.bind(("127.0.0.1", port))
    say("ready")
if role == "echo":
    while True:
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role == "connected":
    data, source = s.recvfrom(65536)
    s.connect(source)
    s.send(data)
    while True:
        s.send(s.recv(65536))
elif role == "epoll":
    e = select.epoll()
    e.register(s, select.EPOLLIN)
    while True:
        e.poll()
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role == "select":
    s.setblocking(False)
    while True:
        select.select([s], [], [])
        data, source = s.recvfrom(65536)
        s.sendto(data, source)
elif role == "ping":
    s.settimeout(20)
    for i in range(count):
        s.sendto(body(i), ("127.0.0.1", port))
        data, source = s.recvfrom(65536)
        assert data == body(i) and source == ("127.0.0.1", port), (i, data[:4], source)
    say(f"answered {count}")
elif role == "flood":
    s.connect(("127.0.0.1", port))
    for i in range(count):
        s.send(body(i))
    say("sent")
elif role == "sink":
    s.settimeout(20)
    got, last, well = 0, -1, True
    try:
        while True:
            data = s.recvfrom(65536)[0]
            s.settimeout(1)
            i = struct.unpack("<I", data[:4])[0]
            well &= i > last and data == body(i)
            got, last = got + 1, i
    except TimeoutError:
        say(f"{got} {'well' if well else 'wrong'}")
elif role == "refused":
    s.connect(("127.0.0.1", port))
    s.settimeout(20)
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
