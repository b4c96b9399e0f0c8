"""Answers questions, and then lets somebody else write to the connection. Usage: handing_server.py ADDRESS PORT"""
import array
import ctypes
import os
import select
import socket
import subprocess
import sys
import time

C = ctypes.CDLL(None)
PYTHON = sys.executable
WORDS = "from another program, "


def exactly(connection, n):
    got = b""
    while len(got) < n:
        part = connection.recv(n - len(got))
        if not part:
            raise EOFError
        got += part
    return got


def hand_over(how, connection):
    fd = connection.fileno()
    write = f"import os; os.write({fd}, {WORDS.encode()!r})"
    read = f"import os; left = os.read({fd}, 64).strip(); os.write({fd}, {WORDS.encode()!r} + left)"
    if "unread" in how:
        # It is there, and nobody has read it.
        select.select([connection], [], [])
    if how == "subprocess that is given it":
        subprocess.run([PYTHON, "-c", write], pass_fds=[fd], check=True)
    elif how == "subprocess that writes to it":
        subprocess.run([PYTHON, "-c", f"print({WORDS!r}, end='')"], stdout=fd, check=True)
    elif how == "subprocess that is not given it":
        subprocess.run([PYTHON, "-c", "pass"], check=True)
    elif how == "subprocess that inherits it by mistake":
        os.set_inheritable(fd, True)
        subprocess.run([PYTHON, "-c", "pass"], close_fds=False, check=True)
    elif how == "posix_spawn":
        os.set_inheritable(fd, True)
        os.waitpid(os.posix_spawn(PYTHON, [PYTHON, "-c", write], os.environ), 0)
    elif how == "posix_spawn with a copy":
        words = [PYTHON, "-c", write.replace(str(fd), "90")]
        os.waitpid(os.posix_spawn(PYTHON, words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, fd, 90)]), 0)
    elif how == "system":
        os.set_inheritable(fd, True)
        os.system(f"printf '{WORDS}' >&{fd}")
    elif how == "fork":
        child = os.fork()
        if child == 0:
            os.write(fd, WORDS.encode())
            os._exit(0)
        os.waitpid(child, 0)
    elif how == "fork and exec, and the parent has closed it":
        connection.sendall(b"before, ")
        child = os.fork()
        if child == 0:
            os.set_inheritable(fd, True)
            os.execv(PYTHON, [PYTHON, "-c", write])
        connection.close()
        os.waitpid(child, 0)
        return False
    elif how.startswith(("exec with something unread", "standard input with something unread")):
        # Otherwise the child begins while the parent has it still.
        waits = not how.endswith("early")
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            if waits:
                # Once nobody else has it.
                os.read(ready, 1)
            if how.startswith("standard input"):
                os.dup2(fd, 0)
                read = read.replace(f"({fd},", "(0,")
            os.set_inheritable(fd, True)
            os.execv(PYTHON, [PYTHON, "-c", read])
        if not waits:
            time.sleep(0.02)
        connection.close()
        os.write(go, b"x")
        os.waitpid(child, 0)
        os.close(ready)
        os.close(go)
        return False
    elif how == "passed with something unread":
        ours, theirs = socket.socketpair()
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        connection.close()
        _, control, _, _ = theirs.recvmsg(1, 100)
        passed = array.array("i")
        passed.frombytes(control[0][2][:4])
        os.write(passed[0], WORDS.encode() + os.read(passed[0], 64).strip())
        os.close(passed[0])
        return False
    elif how == "passed to oneself":
        ours, theirs = socket.socketpair()
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        _, control, _, _ = theirs.recvmsg(1, 100)
        passed = array.array("i")
        passed.frombytes(control[0][2][:4])
        os.write(passed[0], WORDS.encode())
        os.close(passed[0])
    elif how == "formatted output":
        C.dprintf(fd, b"%s %d %.2f %s %d %d %d %s, ", b"a", 1, ctypes.c_double(2.5), b"b", 2, 3, 4, b"c")
        C.__dprintf_chk(fd, 1, b"%s %d %.2f %s %d %d %d %s, ", b"a", 1, ctypes.c_double(2.5), b"b", 2, 3, 4, b"c")
    return True


with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    while True:
        connection, _ = listener.accept()
        try:
            how = exactly(connection, 64).decode().strip()
            for _ in range(2000):
                connection.sendall(exactly(connection, 64))
        except EOFError:
            connection.close()
            continue
        if hand_over(how, connection):
            connection.sendall(b"and the server")
            connection.close()
