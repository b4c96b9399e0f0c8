"""An ordinary server: one thread a connection. Answers `q` with as many bytes, and swallows what follows `s`."""

import socket
import sys
import threading


def serve(connection):
    with connection:
        if connection.recv(1) == b"q":
            while question := connection.recv(64):
                connection.sendall(question)
        else:
            room = bytearray(1 << 18)
            while connection.recv_into(room):
                pass
            connection.sendall(b"!")


listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready to accept connections", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
