"""Sends requests without pause to a server on the port of its argument until the file STOP exists. Checks each answer; the file `rounds` has their number."""

import os
import socket
import sys

folder = sys.argv[2]
rounds = 0
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while not os.path.exists(f"{folder}/stop"):
        question = os.urandom(1024)
        connection.sendall(question)
        answer = b""
        while len(answer) < len(question):
            part = connection.recv(65536)
            if not part:
                sys.exit("the connection ended")
            answer += part
        if answer != question:
            sys.exit("another answer than was sent")
        rounds += 1
        if rounds % 16 == 0:
            # Renamed, so that a reader never finds an empty file.
            with open(f"{folder}/rounds.new", "w") as file:
                file.write(str(rounds))
            os.rename(f"{folder}/rounds.new", f"{folder}/rounds")
