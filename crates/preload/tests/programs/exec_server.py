"""Echoes what one connection brings. After so many pieces it executes itself again, with the connection, and goes on.
Usage: exec_server.py ADDRESS PORT [PIECES]"""
import os
import socket
import sys


def echo(connection, pieces):
    while pieces != 0:
        piece = connection.recv(64, socket.MSG_WAITALL)
        if not piece:
            return False
        connection.sendall(piece)
        pieces -= 1
    return True


if sys.argv[1] == "go-on":
    assert "PARTYWALL_INHERITED" not in os.environ
    echo(socket.socket(fileno=int(sys.argv[2])), -1)
else:
    with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
        connection, _ = listener.accept()
        if echo(connection, int((sys.argv[3:] or [5000])[0])):
            connection.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, "-S", sys.argv[0], "go-on", str(connection.fileno())])
