/*
 * descriptors SOFT HARD
 *
 * A server with these limits of descriptors accepts connections, and exchanges a few bytes on each, until it has no descriptor left. Its
 * client has as many as it wants. Prints how many connections there were, and on how many of them bytes went by something else than TCP.
 * Then it closes all of them, and does the same again.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 12, MOST = 400 };

static void client(in_port_t port) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int n = 0; n < MOST; n++) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port};
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&at, sizeof at)) _exit(0);
        char byte = 'c';
        for (int i = 0; i < ROUNDS; i++)
            if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1 || recv(fd, &byte, 1, 0) != 1) _exit(0);
    }
    _exit(0);
}

// Accepts connections until that fails. Returns how many there were.
static int serve(int listener, int *fds, int *by_ring, int *error) {
    int n = 0, fd;
    *by_ring = 0;
    while (n < MOST && (fd = accept(listener, NULL, NULL)) >= 0) {
        struct timespec moment = {0, 1000000};
        char byte;
        fds[n++] = fd;
        for (int i = 0; i < ROUNDS; i++) {
            if (recv(fd, &byte, 1, 0) != 1) exit(1);
            nanosleep(&moment, NULL);
            if (send(fd, &byte, 1, 0) != 1) exit(1);
        }
        struct tcp_info info = {0};
        socklen_t size = sizeof info;
        getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
        *by_ring += info.tcpi_bytes_sent < ROUNDS;
    }
    *error = errno;
    return n;
}

int main(int count, char **values) {
    if (count != 3) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    struct rlimit limit = {(rlim_t)atoi(values[1]), (rlim_t)atoi(values[2])};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, size) || listen(listener, 5)) return 1;
    getsockname(listener, (struct sockaddr *)&at, &size);
    pid_t child = fork();
    if (child == 0) client(at.sin_port);
    if (setrlimit(RLIMIT_NOFILE, &limit)) return 1;
    alarm(100);
    for (int i = 0; i < 2; i++) {
        int fds[MOST], by_ring, error, n = serve(listener, fds, &by_ring, &error);
        getrlimit(RLIMIT_NOFILE, &limit);
        printf("%d connections, error %d, limit %lu, %d by ring\n", n, error, (unsigned long)limit.rlim_cur, by_ring);
        while (n > 0) close(fds[--n]);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}
