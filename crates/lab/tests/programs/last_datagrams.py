"""A server that answers datagrams, computes for some seconds when it is asked to work, and reads what has come meanwhile; and a client that asks
it to once their datagrams go by rings, sends five more and is killed. Neither sleeps while it waits, so that its rings stay open. The server
prints what it has read, and the client how many of its last datagrams went by the kernel.
Usage: last_datagrams.py serve PORT | last_datagrams.py send PORT"""
import os
import socket
import sys
import time


def by_kernel():
    with open("/proc/net/snmp") as counts:
        return int([line.split() for line in counts if line.startswith("Udp: ")][1][4])


def receive(own, seconds):
    """The next datagram, and where it is from; None if none comes in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return own.recvfrom(2048)
        except BlockingIOError:
            pass
    return None


def serve(server, port):
    server.bind(("127.0.0.1", port))
    print("serves", flush=True)
    while True:
        came = receive(server, 60)
        if came is None:
            continue
        datagram, client = came
        if datagram != b"work":
            server.sendto(datagram, client)
            continue
        server.sendto(b"working", client)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            pass
        read = []
        while (came := receive(server, 1)) is not None:
            read.append(came[0].decode())
        print("read", *read, flush=True)


def send(client, port):
    client.connect(("127.0.0.1", port))
    until = time.monotonic() + 30
    while time.monotonic() < until:
        before = by_kernel()
        for _ in range(20):
            client.send(b"question")
            assert receive(client, 10)[0] == b"question"
        if by_kernel() == before:
            break
    before = by_kernel()
    client.send(b"work")
    assert receive(client, 10)[0] == b"working"
    for number in range(1, 6):
        client.send(str(number).encode())
    print(by_kernel() - before, "by the kernel", flush=True)
    os.kill(os.getpid(), 9)


with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
    own.setblocking(False)
    {"serve": serve, "send": send}[sys.argv[1]](own, int(sys.argv[2]))
