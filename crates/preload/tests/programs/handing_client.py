"""What comes over each connection that its server lets others write to. Usage: handing_client.py ADDRESS PORT"""
import socket
import sys

WAYS = [
    "subprocess that is given it",
    "subprocess that writes to it",
    "subprocess that is not given it",
    "subprocess that inherits it by mistake",
    "posix_spawn",
    "posix_spawn with a copy",
    "system",
    "fork",
    "fork and exec, and the parent has closed it",
    "exec with something unread",
    "standard input with something unread",
    "exec with something unread, early",
    "standard input with something unread, early",
    "passed with something unread",
    "passed to oneself",
    "formatted output",
]

for how in WAYS:
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        connection.sendall(how.encode().ljust(64))
        for n in range(2000):
            question = n.to_bytes(2, "little") * 32
            connection.sendall(question)
            answer = b""
            while len(answer) < 64:
                answer += connection.recv(64 - len(answer))
            assert answer == question
        if "unread" in how:
            connection.sendall(b"which has read what was left unread, ".ljust(64))
        got = b""
        while part := connection.recv(1000):
            got += part
        print(f"{how}: {got.decode()}")
