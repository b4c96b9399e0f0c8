"""A server with a group of SO_REUSEPORT sockets, each with a name, and a client that asks it by several sockets. The kernel chooses a member of the
group for the first datagram of each client's socket. The client checks that this member answers all of them, until most datagrams of both go by
rings. Neither of the two sleeps while it waits, so that its rings stay open. The client prints whether datagrams have gone by rings, or by the kernel
for 30 seconds. LATER is the name of the server's first member. On SIGUSR1 the server has a program choose this member for all datagrams. The client
checks that each question still has one answer, by the kernel's choice or by LATER. It prints "by the program" after 50 rounds in which only LATER has
answered. From then on no other member may answer.
Usage: group_datagrams.py serve PORT NAME... | group_datagrams.py ask PORT LATER"""
import array
import signal
import socket
import struct
import sys
import time


def by_kernel():
    with open("/proc/net/snmp") as counts:
        return int([line.split() for line in counts if line.startswith("Udp: ")][1][4])


def make():
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setblocking(False)
    return own


def receive(own):
    """The name of the member that answers, and the answer."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            name, _, answer = own.recv(2048).decode().partition(" ")
            return name, answer
        except BlockingIOError:
            pass
    sys.exit("no answer comes")


def serve(port, *names):
    members = {name: make() for name in names}
    for own in members.values():
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", int(port)))

    def steer(*_):
        # SO_ATTACH_REUSEPORT_CBPF, and "return 0".
        code = array.array("B", struct.pack("HBBI", 6, 0, 0, 0))
        members[names[0]].setsockopt(socket.SOL_SOCKET, 51, struct.pack("HP", 1, code.buffer_info()[0]))
        print("steers", flush=True)

    signal.signal(signal.SIGUSR1, steer)
    print("serves", flush=True)
    while True:
        for name, own in members.items():
            try:
                datagram, client = own.recvfrom(2048)
                own.sendto(name.encode() + b" " + datagram, client)
            except BlockingIOError:
                pass


def ask(port, later):
    server = ("127.0.0.1", int(port))
    chosen = {}
    # The kernel's choice is not the same for all ports.
    while len(chosen) < 4 or len(set(chosen.values())) < 2:
        own = make()
        own.bind(("127.0.0.1", 0))
        own.sendto(b"first", server)
        chosen[own] = receive(own)[0]
    number = 0

    def all_ask():
        nonlocal number
        number += 1
        for own in chosen:
            own.sendto(str(number).encode(), server)
        return {own: receive(own) for own in chosen}

    def ask_checked(is_allowed):
        answers = all_ask()
        if not all(number_there == str(number) and is_allowed(own, name) for own, (name, number_there) in answers.items()):
            sys.exit(f"{list(answers.values())} for {number}; the kernel chooses {list(chosen.values())}, and a program may choose {later}")
        return {name for name, _ in answers.values()}

    until = time.monotonic() + 30
    said = "by the kernel"
    while said != "by rings" and time.monotonic() < until:
        before = by_kernel()
        for _ in range(20):
            ask_checked(lambda own, name: name == chosen[own])
        # Each question has one answer.
        if by_kernel() - before < 20 * len(chosen):
            said = "by rings"
    print(said, *chosen.values(), flush=True)
    # The members that answered before may answer until their flows have ended.
    rounds = 0
    while rounds < 50:
        by_later = ask_checked(lambda own, name: name in (chosen[own], later)) == {later}
        rounds = rounds + 1 if by_later else 0
    print("by the program", flush=True)
    while True:
        ask_checked(lambda _, name: name == later)


{"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
