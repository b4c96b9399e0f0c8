"""Sends numbered datagrams over one socket until STOP is there, whether they are answered or not, and reads the answers. Prints how many
answers came, how many of them again, and how many with other bytes than were sent.
Usage: datagram_asker.py ADDRESS PORT STOP"""
import os
import socket
import sys
import time


def datagram(number):
    return number.to_bytes(8, "little") + bytes((number + at) % 251 for at in range(1000))


sent, answered, changed, numbers = 0, 0, 0, set()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.connect((sys.argv[1], int(sys.argv[2])))
    client.settimeout(0.1)
    while not os.path.exists(sys.argv[3]):
        # Other programs of an emulated machine need its processor too.
        time.sleep(0.01)
        try:
            client.send(datagram(sent))
            sent += 1
            answer = client.recv(2048)
        except OSError:
            # Lost, or the server is away.
            continue
        number = int.from_bytes(answer[:8], "little")
        answered += 1
        numbers.add(number)
        changed += answer != datagram(number)
print(f"sent {sent}, answered {answered}, twice {answered - len(numbers)}, changed {changed}")
