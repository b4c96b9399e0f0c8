"""A server that answers datagrams, computes when it is asked to work until a file says that the client is gone, and reads what has come
meanwhile; a client that asks it to once their datagrams go by rings, sends five more and is killed or stopped; and a program that takes the
client's address. Neither of the first two sleeps while it waits, so that its rings stay open. The server prints what it has read, and the client
its port and how many of its last datagrams went by the kernel.
Usage: last_datagrams.py serve PORT GONE | last_datagrams.py send PORT KILL|STOP | last_datagrams.py take PORT"""
import os
import signal
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


def expect(own, datagram):
    came = receive(own, 60)
    if came is None or came[0] != datagram:
        sys.exit(f"{came} came, and not {datagram}")


def serve(server, port, gone):
    server.bind(("127.0.0.1", int(port)))
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
        while not os.path.exists(gone):
            pass
        read = []
        try:
            while True:
                read.append(server.recv(2048).decode())
        except BlockingIOError:
            pass
        print("read", *read, flush=True)


def send(client, port, end):
    server = ("127.0.0.1", int(port))
    # Another program may bind a part of this address.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.bind(("0.0.0.0", 0))
    until = time.monotonic() + 30
    while time.monotonic() < until:
        before = by_kernel()
        for _ in range(20):
            client.sendto(b"question", server)
            expect(client, b"question")
        if by_kernel() == before:
            break
    before = by_kernel()
    client.sendto(b"work", server)
    expect(client, b"working")
    for number in range(1, 6):
        client.sendto(str(number).encode(), server)
    print(client.getsockname()[1], by_kernel() - before, "by the kernel", flush=True)
    os.kill(os.getpid(), {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}[end])


def take(thief, port):
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    thief.bind(("127.0.0.1", int(port)))
    print("has it", flush=True)
    while True:
        time.sleep(60)


with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
    own.setblocking(False)
    {"serve": serve, "send": send, "take": take}[sys.argv[1]](own, *sys.argv[2:])
