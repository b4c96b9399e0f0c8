#!/usr/bin/python3
"""Runs a command with newer interfaces of the kernel hidden, by a filter of system calls.

  scripts/older-kernel.py 6.1 COMMAND...

For each system call and socket option in the lists below that is newer than the version, the filter returns the error of a kernel that does not know
it. All else is as on the running kernel. The command must not need a newer kernel than the version.
Needs Debian's python3-seccomp, and root or CAP_SYS_ADMIN."""
import errno
import os
import socket
import sys

import seccomp

# What came with which version.
SOCKET_OPTIONS = [("SO_PASSRIGHTS", 83, (6, 16)), ("SO_PEERPIDFD", 77, (6, 5)), ("SO_PASSPIDFD", 76, (6, 5)), ("SO_NETNS_COOKIE", 71, (5, 14))]
SYSTEM_CALLS = [
    ("cachestat", (6, 5)),
    ("fchmodat2", (6, 6)),
    ("futex_waitv", (5, 16)),
    ("mount_setattr", (5, 12)),
    ("epoll_pwait2", (5, 11)),
    ("close_range", (5, 9)),
    ("faccessat2", (5, 8)),
    ("openat2", (5, 6)),
    ("pidfd_getfd", (5, 6)),
]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    version = tuple(int(part) for part in sys.argv[1].split("."))
    hidden = seccomp.SyscallFilter(seccomp.ALLOW)
    # The command may start programs that gain rights.
    hidden.set_attr(seccomp.Attr.CTL_NNP, 0)
    for name, since in SYSTEM_CALLS:
        if version < since:
            try:
                hidden.add_rule(seccomp.ERRNO(errno.ENOSYS), name)
            except RuntimeError:
                # An older libseccomp.
                print(f"older-kernel: {name} is not hidden: libseccomp does not know it", file=sys.stderr)
    for _, option, since in SOCKET_OPTIONS:
        if version < since:
            for call in ("getsockopt", "setsockopt"):
                level = seccomp.Arg(1, seccomp.EQ, socket.SOL_SOCKET)
                hidden.add_rule(seccomp.ERRNO(errno.ENOPROTOOPT), call, level, seccomp.Arg(2, seccomp.EQ, option))
    hidden.load()
    os.execvp(sys.argv[2], sys.argv[2:])


main()
