"""An ordinary client: prints questions answered per second, and bytes per second of one stream."""

import socket
import sys
import time

address, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])

with socket.create_connection(address) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"q")
    count, start = 0, time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        connection.sendall(bytes(64))
        left = 64
        while left:
            left -= len(connection.recv(left))
        count += 1
    print(count / passed)

with socket.create_connection(address) as connection:
    connection.sendall(b"s")
    count, block, start = 0, bytes(1 << 17), time.monotonic()
    while time.monotonic() - start < seconds:
        connection.sendall(block)
        count += len(block)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(count / (time.monotonic() - start))
