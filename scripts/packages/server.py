"""Echoes all received bytes, on the port of its argument."""

import socket
import sys
import threading


def echo(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
