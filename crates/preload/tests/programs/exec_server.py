"""Echoes what one connection brings. After a piece of ones alone it executes itself again, with the connection, and goes on.
Usage: exec_server.py ADDRESS PORT [execveat]"""
import os
import socket
import sys

MARK = b"\xff" * 64


def echo(connection):
    """Whether the mark has come."""
    while piece := connection.recv(64, socket.MSG_WAITALL):
        connection.sendall(piece)
        if piece == MARK:
            return True
    return False


def execute(arguments, by_descriptor):
    if not by_descriptor:
        os.execv(sys.executable, arguments)
    # The Python of the lab's machines has no such module.
    import ctypes

    program = os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)
    arrays = []
    for strings in arguments, [f"{name}={value}" for name, value in os.environ.items()]:
        arrays.append((ctypes.c_char_p * (len(strings) + 1))(*map(os.fsencode, strings)))
    library = ctypes.CDLL(None, use_errno=True)
    library.execveat(program, b"", *arrays, 0x1000)
    raise OSError(ctypes.get_errno(), "execveat")


if sys.argv[1] == "go-on":
    assert "PARTYWALL_INHERITED" not in os.environ
    echo(socket.socket(fileno=int(sys.argv[2])))
else:
    with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
        connection, _ = listener.accept()
        if echo(connection):
            connection.set_inheritable(True)
            arguments = [sys.executable, "-S", sys.argv[0], "go-on", str(connection.fileno())]
            execute(arguments, by_descriptor="execveat" in sys.argv)
