"""Asks a web server on the port of its argument for one file again and again, over one connection, until the file STOP exists. Checks each answer."""

import http.client
import os
import sys

folder = sys.argv[2]
with open("/usr/share/common-licenses/BSD", "rb") as file:
    wanted = file.read()
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
while not os.path.exists(f"{folder}/stop"):
    connection.request("GET", "/BSD")
    if connection.getresponse().read() != wanted:
        sys.exit("another answer than the file")
