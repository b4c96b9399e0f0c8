"""Does with its connections to an echo what it is told on standard input, and says so when it is done: `connect`, `talk TIMES`, or with
the first of them alone, `talk TIMES HOW_MANY`, `mark` (a piece of ones alone), and `end`. Usage: told_client.py ADDRESS PORT"""
import socket
import sys

connections = []
for line in sys.stdin:
    words = line.split()
    if words[0] == "connect":
        connections.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    elif words[0] in ("talk", "mark"):
        pieces = range(int(words[1])) if words[0] == "talk" else [0xFFFF]
        for n in pieces:
            for connection in connections[: int(words[2]) if len(words) > 2 else None]:
                question = n.to_bytes(2, "little") * 32
                connection.sendall(question)
                answer = b""
                while len(answer) < 64:
                    part = connection.recv(64 - len(answer))
                    assert part, "the server has closed the connection"
                    answer += part
                assert answer == question
    print(line.strip(), flush=True)
    if words[0] == "end":
        break
