"""Sends back each datagram. Usage: datagram_echo.py PORT"""
import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("0.0.0.0", int(sys.argv[1])))
    print("answers", flush=True)
    while True:
        server.sendto(*server.recvfrom(2048))
