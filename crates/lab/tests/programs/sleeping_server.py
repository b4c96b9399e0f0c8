"""Echoes what comes on any number of connections, by one thread that sleeps in epoll_wait. Ends when no connection is left after the first."""
import select
import socket
import sys

listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=512)
listener.setblocking(False)
poll = select.epoll()
poll.register(listener, select.EPOLLIN)
connections, unsent, most = {}, {}, 0
print("listens", flush=True)
while not most or connections:
    for number, events in poll.poll():
        if number == listener.fileno():
            try:
                while True:
                    connection = listener.accept()[0]
                    connection.setblocking(False)
                    connections[connection.fileno()], unsent[connection.fileno()] = connection, b""
                    poll.register(connection, select.EPOLLIN)
            except BlockingIOError:
                most = max(most, len(connections))
            continue
        connection = connections[number]
        try:
            if events & ~select.EPOLLOUT:
                came = connection.recv(65536)
                if not came:
                    poll.unregister(number)
                    del connections[number], unsent[number]
                    connection.close()
                    continue
                unsent[number] += came
            unsent[number] = unsent[number][connection.send(unsent[number]):]
        except BlockingIOError:
            pass
        poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if unsent[number] else 0))
print("at most", most, "at once", flush=True)
