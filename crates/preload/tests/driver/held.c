/*
 * What the reader of a connection sees while its writer holds bytes back: by MSG_MORE, TCP_CORK, sendfile below a cork, and at the end.
 *
 * Prints a line for each case, and then one that begins with '#': in how many cases the bytes went by something else than TCP.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Milliseconds: shorter than bytes are held back, and longer. */
enum { SHORT = 20, LONG = 30000 };

static int writer, reader, set;
static char line[4096];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void pause_ms(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static void option(int name, int value) {
    if (setsockopt(writer, IPPROTO_TCP, name, &value, sizeof value)) fail("setsockopt");
}

static void say(const char *what, int n) { sprintf(line + strlen(line), " %s=%d", what, n); }

/* What the reader hears by poll, and by epoll, edge-triggered; how many bytes wait; and what it gets if it takes them. */
static void look(int ms) {
    struct pollfd p = {reader, POLLIN, 0};
    say("poll", poll(&p, 1, ms));
    struct epoll_event e;
    int waiting = -1;
    ioctl(reader, FIONREAD, &waiting);
    say("waiting", waiting);
    say("edge", epoll_wait(set, &e, 1, 0));
}

static void take(void) {
    char bytes[1 << 12];
    int n = (int)recv(reader, bytes, sizeof bytes, MSG_DONTWAIT);
    say("took", n);
    if (n > 0) sprintf(line + strlen(line), " '%.*s'", n, bytes);
}

static void put(const char *text, int flags) {
    if (send(writer, text, strlen(text), flags) != (ssize_t)strlen(text)) fail("send");
}

static void send_file(const char *text) {
    int file = memfd_create("body", MFD_CLOEXEC);
    off_t at = 0;
    if (write(file, text, strlen(text)) < 0 || sendfile(writer, file, &at, strlen(text)) != (ssize_t)strlen(text)) fail("sendfile");
    close(file);
}

static void more(void) { put("one ", MSG_MORE); look(SHORT); put("two", 0); look(LONG); take(); }
static void more_twice(void) { put("one ", MSG_MORE); put("two ", MSG_MORE); look(SHORT); put("three", 0); look(LONG); take(); }
static void more_alone(void) { put("one", MSG_MORE); look(SHORT); look(LONG); take(); }
static void cork(void) { option(TCP_CORK, 1); put("one ", 0); look(SHORT); put("two", 0); look(SHORT); option(TCP_CORK, 0); look(LONG); take(); }
static void cork_and_file(void) { option(TCP_CORK, 1); put("head ", 0); send_file("body"); look(SHORT); option(TCP_CORK, 0); look(LONG); take(); }
static void cork_and_nodelay(void) { option(TCP_CORK, 1); put("one", 0); look(SHORT); option(TCP_NODELAY, 1); look(LONG); take(); option(TCP_CORK, 0); }
static void cork_alone(void) { option(TCP_CORK, 1); put("one", 0); look(LONG); take(); option(TCP_CORK, 0); }
static void cork_with_unread(void) { put("one ", 0); look(LONG); option(TCP_CORK, 1); put("two", 0); look(SHORT); take(); look(SHORT); option(TCP_CORK, 0); look(LONG); take(); }
static void more_and_shutdown(void) { put("one", MSG_MORE); look(SHORT); shutdown(writer, SHUT_WR); look(LONG); take(); take(); }
static void cork_and_close(void) { option(TCP_CORK, 1); put("one", 0); look(SHORT); close(writer); writer = -1; look(LONG); take(); take(); }

static const struct { const char *name; void (*run)(void); } cases[] = {
    {"more", more}, {"more-twice", more_twice}, {"more-alone", more_alone}, {"cork", cork}, {"cork+sendfile", cork_and_file},
    {"cork+nodelay", cork_and_nodelay}, {"cork-alone", cork_alone}, {"cork+unread", cork_with_unread},
    {"more+shutdown", more_and_shutdown}, {"cork+close", cork_and_close},
};

static uint64_t sent_by_tcp(void) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(reader, IPPROTO_TCP, TCP_INFO, &info, &size);
    return info.tcpi_bytes_received;
}

static void meet(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1)) fail("listen");
    getsockname(listener, (struct sockaddr *)&at, &size);
    writer = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(writer, (struct sockaddr *)&at, sizeof at)) fail("connect");
    reader = accept(listener, NULL, NULL);
    close(listener);
    /* Enough calls of both ends for them to find a better way. */
    char byte;
    for (int i = 0; i < 12; i++) {
        if (send(writer, "x", 1, 0) != 1 || recv(reader, &byte, 1, 0) != 1) fail("there");
        if (send(reader, "x", 1, 0) != 1 || recv(writer, &byte, 1, 0) != 1) fail("and back");
    }
    set = epoll_create1(0);
    struct epoll_event e = {EPOLLIN | EPOLLET, {0}};
    if (epoll_ctl(set, EPOLL_CTL_ADD, reader, &e)) fail("epoll_ctl");
    while (epoll_wait(set, &e, 1, 0) > 0) {}
    /* All is acknowledged, so that no answer of the kernel sends what is held back. */
    pause_ms(100);
}

int main(void) {
    int by_ring = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        *line = 0;
        meet();
        uint64_t before = sent_by_tcp();
        cases[i].run();
        /* An end counts as a byte. */
        by_ring += sent_by_tcp() - before <= 1;
        printf("%s%s\n", cases[i].name, line);
        close(writer);
        close(reader);
        close(set);
    }
    printf("# %d\n", by_ring);
    return 0;
}
