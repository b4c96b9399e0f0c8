"""Talks to an echo on sockets that it enters into epoll sets before it connects them, and says what came back.
Usage: early_client.py ADDRESS PORT [FUNCTION]"""
import ctypes
import errno
import hashlib
import os
import random
import select
import selectors
import socket
import sys
import threading

ADDRESS = (sys.argv[1], int(sys.argv[2]))
SIZE = 3_000_000


class Talk:
    """One connection: what it sends, and what came back."""

    def __init__(self, seed):
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.data, self.sent, self.back = random.Random(seed).randbytes(SIZE), 0, bytearray()

    def connect(self):
        assert self.socket.connect_ex(ADDRESS) in (0, errno.EINPROGRESS)

    def step(self, until_refused=False):
        """Sends and receives what there is; False when all has come back."""
        while self.sent < SIZE:
            try:
                self.sent += self.socket.send(self.data[self.sent : self.sent + 30_000])
            except BlockingIOError:
                break
            if not until_refused:
                break
        while len(self.back) < SIZE:
            try:
                part = self.socket.recv(50_000)
            except BlockingIOError:
                break
            assert part, "the echo ended"
            self.back += part
            if not until_refused:
                break
        return len(self.back) < SIZE

    def result(self):
        self.socket.close()
        assert self.back == self.data
        return hashlib.sha256(self.back).hexdigest()[:16]


def connected(events):
    """A socket that is not connected yet is reported as hung up."""
    return not events & select.EPOLLHUP


def by_selectors(seed):
    talk = Talk(seed)
    with selectors.DefaultSelector() as selector:
        selector.register(talk.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        talk.connect()
        while True:
            selector.select()
            if not talk.step():
                return talk.result()
            if talk.sent == SIZE:
                selector.modify(talk.socket, selectors.EVENT_READ)


def by_edges(seed):
    talk = Talk(seed)
    with select.epoll() as poll:
        poll.register(talk.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        poll.poll(0)
        talk.connect()
        while True:
            events = poll.poll()
            if connected(events[0][1]) and not talk.step(until_refused=True):
                return talk.result()


def by_one_shots(seed):
    """Threads that wait in one set; what a thread has been told of, it alone has until it arms it again."""
    talk, busy, done, faults = Talk(seed), threading.Lock(), threading.Event(), []
    with select.epoll() as poll:
        mask = select.EPOLLIN | select.EPOLLOUT | select.EPOLLONESHOT
        poll.register(talk.socket, mask)
        # It fires at once, and is armed again when there is a connection.
        assert poll.poll() == [(talk.socket.fileno(), select.EPOLLOUT | select.EPOLLHUP)]
        talk.connect()

        def work():
            while not done.is_set():
                for fd, events in poll.poll(0.2):
                    if not busy.acquire(blocking=False):
                        faults.append("told to two threads at once")
                        done.set()
                        return
                    goes_on = talk.step() if connected(events) else True
                    busy.release()
                    if goes_on:
                        poll.modify(fd, mask if talk.sent < SIZE else select.EPOLLIN | select.EPOLLONESHOT)
                    else:
                        done.set()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        poll.modify(talk.socket, mask)
        for thread in threads:
            thread.join()
    assert not faults, faults
    return talk.result()


def by_exclusive(seed):
    talk, done = Talk(seed), threading.Event()
    busy = threading.Lock()

    def work():
        with select.epoll() as poll:
            poll.register(talk.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLEXCLUSIVE)
            ready.wait()
            while not done.is_set():
                if any(connected(events) for _, events in poll.poll(0.2)):
                    with busy:
                        if not talk.step():
                            done.set()

    ready = threading.Barrier(3)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    talk.connect()
    for thread in threads:
        thread.join()
    return talk.result()


def by_libevent(seed):
    try:
        event = ctypes.CDLL("libevent-2.1.so.7")
    except OSError:
        return by_edges(seed)
    for name in ("event_base_new", "event_new"):
        getattr(event, name).restype = ctypes.c_void_p
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_short, ctypes.c_void_p)
    talk, base = Talk(seed), ctypes.c_void_p(event.event_base_new())
    edge, persist, read, write = 0x20, 0x10, 2, 4

    def told(fd, what, _):
        try:
            talk.socket.getpeername()
        except OSError:
            return
        if not talk.step(until_refused=True):
            event.event_base_loopbreak(base)

    told = callback(told)
    one = ctypes.c_void_p(event.event_new(base, talk.socket.fileno(), edge | persist | read | write, told, None))
    assert event.event_add(one, None) == 0
    talk.connect()
    event.event_base_dispatch(base)
    event.event_free(one)
    event.event_base_free(base)
    return talk.result()


def with_a_child_that_waits(seed):
    """A child waits in the set that its parent has made, too: both are told."""
    talk = Talk(seed)
    poll = select.epoll()
    poll.register(talk.socket, select.EPOLLIN)
    poll.poll(0)
    hear, tell = os.pipe()
    hear_child, tell_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(hear, 1)
        poll.poll(0)
        os.write(tell_parent, b"x")
        told = any(connected(events) for _ in range(2000) for _, events in poll.poll(0.01))
        os._exit(0 if told else 1)
    talk.connect()
    talk.socket.setblocking(True)
    for n in range(300):
        talk.socket.sendall(b"x" * 64)
        got = 0
        while got < 64:
            got += len(talk.socket.recv(64 - got))
    # The child waits in the set from here on, and the answer lies unread until it has been told.
    os.write(tell, b"x")
    os.read(hear_child, 1)
    talk.socket.sendall(b"for the child")
    assert poll.poll() == [(talk.socket.fileno(), select.EPOLLIN)]
    status = os.waitpid(child, 0)[1]
    back = b""
    while len(back) < 13:
        back += talk.socket.recv(100)
    poll.close()
    for fd in (hear, tell, hear_child, tell_parent):
        os.close(fd)
    talk.socket.close()
    return f"the child ended with {status}; {back.decode()}"


def by_refused_connect(seed):
    """The first connect fails, and the second does not."""
    talk, nobody = Talk(seed), socket.socket()
    nobody.bind((ADDRESS[0], 0))
    with select.epoll() as poll:
        poll.register(talk.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
        talk.socket.setblocking(True)
        refused = [errno.errorcode[talk.socket.connect_ex(nobody.getsockname())] for _ in range(2)]
        told = [events for _, events in poll.poll(0)]
        talk.socket.setblocking(False)
        talk.connect()
        while True:
            events = poll.poll()
            if connected(events[0][1]) and not talk.step():
                return f"{refused} {told} {talk.result()}"


ALL = [by_selectors, by_edges, by_one_shots, by_exclusive, by_libevent, with_a_child_that_waits, by_refused_connect]
for seed, how in enumerate(ALL):
    if sys.argv[3:] not in ([], [how.__name__]):
        continue
    print(f"{how.__name__}: {how(seed)}", flush=True)
