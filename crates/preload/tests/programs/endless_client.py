"""Talks to an echo on one connection until its standard input ends. Usage: endless_client.py ADDRESS PORT"""
import random
import select
import socket
import sys

noise = random.Random(sys.argv[2])
carried = 0
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        data = noise.randbytes(noise.randrange(1, 60_000))
        connection.sendall(data)
        back = b""
        while len(back) < len(data):
            part = connection.recv(len(data) - len(back))
            assert part, "the echo ended"
            back += part
        assert back == data, f"after {carried} bytes"
        carried += len(data)
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
print("echoed all of", carried)
