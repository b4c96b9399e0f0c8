/*
 * load serve PORT                    answers each connection as it asks: with echoes, or a stream
 * load fork PORT                     the same in a child for each connection, which does not keep the listener
 * load await PORT                    as serve, and waits for connections by epoll
 * load poll PORT                     as serve, and waits for connections by poll
 * load await-in-turns PORT           as await, for a short time again and again; so does poll-in-turns
 * load echo PORT ROUNDS SEED         questions of random sizes, and compares the answers
 * load pull PORT BYTES SEED          takes a stream, and compares it with what it has to be
 * load come PORT TIMES SEED          connects, one question and answer, closes; over and over
 *
 * Exit status of a client: 0 everything as it should be; 10 the other side has gone, as TCP shows it (a reset, a broken pipe, the end of
 * the stream); 20 wrong bytes; 30 anything else.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { GONE = 10, WRONG = 20, ODD = 30, LARGEST = 200000 };

static uint64_t next(uint64_t *s) {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    return *s ^= *s << 17;
}

static unsigned char byte_at(uint64_t seed, uint64_t at) { return (unsigned char)((at ^ seed) * 0x9E3779B97F4A7C15u >> 56); }

static int fault(void) {
    switch (errno) {
    case ECONNRESET: case EPIPE: case ECONNREFUSED: case ETIMEDOUT: return GONE;
    default: perror("load"); return ODD;
    }
}

static int send_all(int fd, const unsigned char *bytes, size_t n) {
    while (n) {
        ssize_t r = send(fd, bytes, n, MSG_NOSIGNAL);
        if (r < 0) return fault();
        bytes += r;
        n -= (size_t)r;
    }
    return 0;
}

static int recv_all(int fd, unsigned char *to, size_t n) {
    while (n) {
        ssize_t r = recv(fd, to, n, 0);
        if (r == 0) return GONE;
        if (r < 0) return fault();
        to += r;
        n -= (size_t)r;
    }
    return 0;
}

/* What a client asks for first: a kind, a number and a seed. */
struct order { uint64_t kind, n, seed; };

static void *serve_one(void *given) {
    int fd = (int)(intptr_t)given, on = 1;
    struct order order;
    unsigned char *buffer = malloc(LARGEST);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (recv_all(fd, (unsigned char *)&order, sizeof order) == 0) {
        if (order.kind == 'e') {
            ssize_t r;
            while ((r = recv(fd, buffer, LARGEST, 0)) > 0)
                if (send_all(fd, buffer, (size_t)r)) break;
        } else {
            uint64_t at = 0, state = order.seed | 1;
            while (at < order.n) {
                size_t part = 1 + next(&state) % LARGEST;
                if (part > order.n - at) part = order.n - at;
                for (size_t i = 0; i < part; i++) buffer[i] = byte_at(order.seed, at + i);
                if (send_all(fd, buffer, part)) break;
                at += part;
            }
        }
    }
    free(buffer);
    close(fd);
    return NULL;
}

/* WAITS for connections by: accept, fork (accept, and children), await (epoll) or poll */
static int serve(int port, const char *waits, int timeout) {
    int forks = !strcmp(waits, "fork"), awaits = !strcmp(waits, "await"), polls = !strcmp(waits, "poll");
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_ANY)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1000)) {
        perror("load: listening");
        return ODD;
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event)) return ODD;
    for (;;) {
        struct pollfd asked = {.fd = fd, .events = POLLIN};
        if (awaits && epoll_wait(set, &event, 1, timeout) != 1) continue;
        if (polls && poll(&asked, 1, timeout) != 1) continue;
        int one = accept(fd, NULL, NULL);
        if (one < 0) continue;
        if (forks) {
            pid_t child = fork();
            if (child == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(fd);
                serve_one((void *)(intptr_t)one);
                _exit(0);
            }
            close(one);
            continue;
        }
        pthread_t thread;
        if (pthread_create(&thread, &attributes, serve_one, (void *)(intptr_t)one)) close(one);
    }
}

static int reach(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0) return fd;
    close(fd);
    return -1;
}

static int echo(int fd, uint64_t rounds, uint64_t seed) {
    static unsigned char out[LARGEST], in[LARGEST];
    uint64_t state = seed | 1;
    struct order order = {'e', 0, seed};
    int r = send_all(fd, (unsigned char *)&order, sizeof order);
    for (uint64_t i = 0; i < rounds && !r; i++) {
        /* Not more than both directions hold: this side does not read while it writes. */
        size_t n = 1 + next(&state) % (i % 10 ? 500 : 8000);
        for (size_t k = 0; k < n; k++) out[k] = byte_at(state, k);
        r = send_all(fd, out, n);
        if (!r) r = recv_all(fd, in, n);
        if (!r && memcmp(in, out, n)) r = WRONG;
    }
    return r;
}

static int pull(int fd, uint64_t bytes, uint64_t seed) {
    static unsigned char in[LARGEST];
    uint64_t at = 0, state = seed * 3 | 1;
    struct order order = {'p', bytes, seed};
    int r = send_all(fd, (unsigned char *)&order, sizeof order);
    while (at < bytes && !r) {
        ssize_t n = recv(fd, in, 1 + next(&state) % LARGEST, 0);
        if (n == 0) return GONE;
        if (n < 0) return fault();
        for (ssize_t k = 0; k < n; k++)
            if (in[k] != byte_at(seed, at + (uint64_t)k)) {
                fprintf(stderr, "load: byte %lu is wrong\n", at + (uint64_t)k);
                return WRONG;
            }
        at += (uint64_t)n;
    }
    return r;
}

int main(int count, char **words) {
    signal(SIGPIPE, SIG_IGN);
    if (count == 3 && !strcmp(words[1], "serve")) return serve(atoi(words[2]), "accept", -1);
    if (count == 3 && !strcmp(words[1], "fork")) return serve(atoi(words[2]), "fork", -1);
    if (count == 3 && !strcmp(words[1], "await")) return serve(atoi(words[2]), "await", -1);
    if (count == 3 && !strcmp(words[1], "poll")) return serve(atoi(words[2]), "poll", -1);
    if (count == 3 && !strcmp(words[1], "await-in-turns")) return serve(atoi(words[2]), "await", 300);
    if (count == 3 && !strcmp(words[1], "poll-in-turns")) return serve(atoi(words[2]), "poll", 300);
    if (count != 5) return ODD;
    int port = atoi(words[2]), r = 0;
    uint64_t n = strtoull(words[3], NULL, 0), seed = strtoull(words[4], NULL, 0);
    uint64_t times = !strcmp(words[1], "come") ? n : 1;
    for (uint64_t i = 0; i < times && !r; i++) {
        int fd = reach(port);
        if (fd < 0) return GONE;
        if (!strcmp(words[1], "pull")) r = pull(fd, n, seed);
        else if (!strcmp(words[1], "come")) r = echo(fd, 1 + i % 40, seed + i);
        else r = echo(fd, n, seed);
        close(fd);
    }
    return r;
}
