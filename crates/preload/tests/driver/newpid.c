// A program that forks a child in its own pid namespace, and then one in another.
//
//   newpid PORT daemon   connects to an echo server, goes on in a child whose parent ends at once, and says the same of that child
//   newpid PORT   connects to an echo server, and says for each child by which way the connection goes after the fork, and in how many
//                 exchanges of the child and of the parent bytes were missing or wrong
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1000, ROUNDS = 20 };

static int open_connection(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval limit = {.tv_sec = 60};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) exit(3);
    return fd;
}

static unsigned long sent_by_tcp(int fd) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    return info.tcpi_bytes_sent;
}

// In how many rounds what was sent did not come back.
static int wrong(int fd, unsigned char seed) {
    int count = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        unsigned char sent[BYTES], came[BYTES] = {0};
        memset(sent, seed + round, sizeof sent);
        int done = 0;
        if (send(fd, sent, BYTES, MSG_NOSIGNAL) == BYTES)
            for (ssize_t n; done < BYTES && (n = recv(fd, came + done, (size_t)(BYTES - done), 0)) > 0;) done += (int)n;
        count += memcmp(sent, came, BYTES) != 0;
    }
    return count;
}

static void fork_one(int fd, const char *name) {
    unsigned long before = sent_by_tcp(fd);
    pid_t child = fork();
    if (child < 0) exit(4);
    if (!child) {
        int failures = wrong(fd, 1);
        close(fd);
        _exit(failures);
    }
    int status = 0;
    waitpid(child, &status, 0);
    int parents = wrong(fd, 2);
    unsigned long by_tcp = sent_by_tcp(fd) - before;
    const char *way = by_tcp == 0 ? "ring" : by_tcp == 2 * ROUNDS * BYTES ? "tcp" : "both";
    printf("%s: %s child %d parent %d", name, way, WIFEXITED(status) ? WEXITSTATUS(status) : -1, parents);
}

int main(int count, char **values) {
    if (count < 2) return 2;
    int fd = open_connection(atoi(values[1]));
    // Until it has its ring.
    for (int i = 0; i < 10; ++i)
        if (wrong(fd, 3)) return 5;
    if (count > 2) {
        if (daemon(1, 1)) return 7;
        unsigned long before = sent_by_tcp(fd);
        int failures = wrong(fd, 4);
        printf("daemon: %s wrong %d\n", sent_by_tcp(fd) == before ? "ring" : "tcp", failures);
        return 0;
    }
    fork_one(fd, "same");
    fflush(stdout);
    if (unshare(CLONE_NEWPID)) return 6;
    printf(", ");
    fork_one(fd, "other");
    printf("\n");
    return 0;
}
