"""Sets and gets in the text protocol, many at once. Usage: memcached_client.py ADDRESS PORT"""
import hashlib
import random
import socket
import sys
import time

connections = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(10)]
files = [c.makefile("rwb") for c in connections]
rng = random.Random(7)
values = {f"key{i}": rng.randbytes(rng.randrange(1, 200_000)) for i in range(200)}
for i, (key, value) in enumerate(values.items()):
    f = files[i % len(files)]
    f.write(b"set %s 0 0 %d\r\n%s\r\n" % (key.encode(), len(value), value))
    f.flush()
for i in range(len(values)):
    assert files[i % len(files)].readline() == b"STORED\r\n"
heard = hashlib.sha256()
for i, (key, value) in enumerate(values.items()):
    f = files[(i + 3) % len(files)]
    f.write(b"get %s\r\n" % key.encode())
    f.flush()
    head = f.readline().split()
    got = f.read(int(head[3]) + 2)[:-2]
    assert f.readline() == b"END\r\n"
    assert got == value, key
    heard.update(got)
for f in files:
    for _ in range(500):
        f.write(b"incr none 1\r\n")
    f.flush()
for f in files:
    for _ in range(500):
        assert f.readline() == b"NOT_FOUND\r\n"
print(heard.hexdigest(), flush=True)
# So that whoever looks at the connections sees them.
time.sleep(0.5)
