"""Opens many connections at once and has bytes echoed on all of them, again and again, until a file is there."""
import os
import socket
import sys

host, port, count, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
connections = [socket.create_connection((host, port), timeout=300) for _ in range(count)]
rounds = 0
while rounds < 8 or not os.path.exists(stop):
    messages = [(b"%d of %d;" % (number, rounds)) * 30 for number in range(count)]
    for connection, message in zip(connections, messages):
        connection.sendall(message)
    for connection, message in zip(connections, messages):
        answer = b""
        while len(answer) < len(message):
            came = connection.recv(len(message) - len(answer))
            if not came:
                sys.exit("a connection has ended")
            answer += came
        if answer != message:
            sys.exit("another answer than %r: %r" % (message, answer))
    rounds += 1
    if rounds == 8:
        print("all are served", flush=True)
for connection in connections:
    connection.close()
print("ended", flush=True)
