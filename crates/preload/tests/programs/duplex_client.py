"""As told_client.py, but a second thread receives the answers, and is blocked in a receiving call while the first thread sends. A third
thread sleeps. Usage: duplex_client.py ADDRESS PORT"""
import queue
import socket
import sys
import threading

connections = []


def receive(connection, answers):
    while answer := connection.recv(64, socket.MSG_WAITALL):
        answers.put(answer)


threading.Thread(target=threading.Event().wait, daemon=True).start()
for line in sys.stdin:
    words = line.split()
    if words[0] == "connect":
        connection, answers = socket.create_connection((sys.argv[1], int(sys.argv[2]))), queue.Queue()
        threading.Thread(target=receive, args=(connection, answers), daemon=True).start()
        connections.append((connection, answers))
    elif words[0] in ("talk", "mark"):
        pieces = range(int(words[1])) if words[0] == "talk" else [0xFFFF]
        for n in pieces:
            for connection, answers in connections:
                question = n.to_bytes(2, "little") * 32
                connection.sendall(question)
                assert answers.get(timeout=60) == question
    print(line.strip(), flush=True)
    if words[0] == "end":
        break
