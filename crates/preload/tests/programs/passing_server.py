"""Passes one connection to a worker, another program, which echoes what comes. Usage: passing_server.py ADDRESS PORT HOW

HOW is `at once`, `after use` (pieces are echoed here before, up to one of ones alone), `twice` (in two messages), `and keep` (a copy stays open
here), `peeked` (the worker looks at the message before it takes it), `forked` (a child of the worker has it, too), or `on and on` (the worker
passes it to another one, and keeps a copy)."""
import array
import os
import socket
import subprocess
import sys


MARK = b"\xff" * 64


def echo(connection, last=None):
    """Echoes pieces to the end, or up to the last one."""
    while piece := connection.recv(64, socket.MSG_WAITALL):
        connection.sendall(piece)
        if piece == last:
            return


def receive(carrier, flags=0):
    descriptors = array.array("i")
    _, control, _, _ = carrier.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize), flags)
    descriptors.frombytes(control[0][2])
    return socket.socket(fileno=descriptors[0])


def send(carrier, connection):
    carrier.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))])


def start_worker(how):
    ours, theirs = socket.socketpair()
    command = [sys.executable, sys.argv[0], "worker", str(theirs.fileno()), how]
    worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return worker, ours


if sys.argv[1] == "worker":
    carrier, how = socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    peeked = receive(carrier, socket.MSG_PEEK) if how == "peeked" else None
    connection = receive(carrier)
    again = receive(carrier) if how == "twice" else None
    if how == "forked" and os.fork() == 0:
        # Until the server ends.
        carrier.recv(1)
        os._exit(0)
    if how == "on and on":
        other, further = start_worker("at once")
        send(further, connection)
        sys.exit(other.wait())
    echo(connection)
else:
    how = sys.argv[3]
    with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
        worker, ours = start_worker(how)
        connection, _ = listener.accept()
        if how == "after use":
            echo(connection, MARK)
        kept = socket.socket(fileno=os.dup(connection.fileno())) if how == "and keep" else None
        send(ours, connection)
        if how == "twice":
            send(ours, connection)
        connection.close()
        sys.exit(worker.wait())
