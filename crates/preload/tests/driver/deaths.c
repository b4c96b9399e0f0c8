/*
 * deaths STRIDE FIRST [ONLY]
 *
 * What one end of a TCP connection (the survivor) sees after the other end (the mortal) has gone. A case is one connection:
 *
 *   how the mortal ends x what it leaves unread x what it sent last x whether the survivor has shut down x the survivor's calls
 *
 * ONLY is the number of a case, or a death and the first call, as "close:S": then all cases with these, with both
 * ends on one core.
 *
 * Prints one line for each case FIRST, FIRST + STRIDE, ..., or for those that are asked for, and then a line that begins with '#': in how many cases the survivor's
 * bytes went by something else than TCP.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 12, SOME = 100, LAST = 50 };

/* How the mortal ends. */
enum {
    KILLED, EXITS_AT_ONCE, EXITS, CLOSES, RESETS,
    /* After a `shutdown`. */
    SHUTS_WRITING_THEN_KILLED, SHUTS_READING_THEN_KILLED, SHUTS_BOTH_THEN_KILLED,
    SHUTS_WRITING_THEN_CLOSES, SHUTS_READING_THEN_CLOSES, SHUTS_BOTH_THEN_CLOSES, SHUTS_WRITING_THEN_RESETS, DEATHS
};
/* "reset" is `close` with a time to linger of 0. */
static const char *const deaths[] = {
    "kill", "_exit", "exit", "close", "reset", "shut-wr+kill", "shut-rd+kill", "shut-rdwr+kill",
    "shut-wr+close", "shut-rd+close", "shut-rdwr+close", "shut-wr+reset",
};
/* What of the survivor's bytes the mortal has not read. */
enum { NOTHING, ALL_READ, BY_TCP, BY_RING, BY_BOTH, FULL, LEFTS };
static const char *const lefts[] = {"nothing", "all-read", "tcp", "ring", "both", "full"};
/*
 * The survivor's calls, in order: p poll for all, q poll for room, w poll for nothing, x select, r recv, s send, f sendfile, e SO_ERROR,
 * l epoll by level, t epoll by edge; n recv and m send of a socket that does not block, b recv and d send that block, with a time-out.
 * A capital letter is the same call made before the death, so that it sleeps through it.
 */
static const char *const orders[] = {
    "prsprs", "psrpsr", "rpsrps", "rsprsp", "sprspr", "srpsrp", "epreps", "pepepr", "rerprs", "sesprs",
    "qwxqrs", "lprlsl", "tprsel", "Rpsrpe", "Pprspr", "Lprslr", "Spsrpe", "xrsxpq", "fprfpr", "pflfrp",
    "bpdbpd", "dpbdpb", "npmnpm", "mpnmpn", "Bpdbpe", "Dpbdpe",
};
enum { ORDERS = sizeof orders / sizeof *orders };

struct death_case { int how, left, last, own_end, order; };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void pause_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

static void tell(int control) {
    if (write(control, "x", 1) != 1) _exit(4);
}

static void hear(int control) {
    char byte;
    ssize_t n;
    do n = read(control, &byte, 1);
    while (n < 0 && errno == EINTR);
    if (n != 1) _exit(5);
}

/* The two sides in lockstep: `first` accepts. */
static int meet(int control, bool accepts) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd;
    if (accepts) {
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1)) fail("listen");
        getsockname(listener, (struct sockaddr *)&at, &size);
        if (write(control, &at.sin_port, 2) != 2) fail("port");
        fd = accept(listener, NULL, NULL);
        close(listener);
    } else {
        if (read(control, &at.sin_port, 2) != 2) fail("port");
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&at, sizeof at)) fail("connect");
    }
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static const char bytes[8192];

static void mortal(const struct death_case *c, int control, bool accepts, bool asleep) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = meet(control, accepts);
    if (c->left == BY_TCP || c->left == BY_BOTH) hear(control);
    /* Enough calls of both sides for them to find a better way. */
    for (int i = 0; i < ROUNDS; i++) {
        if (send(fd, "m", 1, 0) != 1) _exit(6);
        hear(control);
    }
    tell(control);
    hear(control); /* The survivor has sent what it sends. */
    char in[SOME];
    if (c->left == ALL_READ && recv(fd, in, SOME, MSG_WAITALL) != SOME) _exit(7);
    if (c->last && send(fd, bytes, LAST, 0) != LAST) _exit(8);
    tell(control);
    hear(control); /* It has ended its own direction, if it does. */
    if (asleep) pause_ms(30);
    switch (c->how) {
    case SHUTS_WRITING_THEN_KILLED: case SHUTS_WRITING_THEN_CLOSES: case SHUTS_WRITING_THEN_RESETS: shutdown(fd, SHUT_WR); break;
    case SHUTS_READING_THEN_KILLED: case SHUTS_READING_THEN_CLOSES: shutdown(fd, SHUT_RD); break;
    case SHUTS_BOTH_THEN_KILLED: case SHUTS_BOTH_THEN_CLOSES: shutdown(fd, SHUT_RDWR); break;
    }
    if (c->how >= SHUTS_WRITING_THEN_KILLED) pause_ms(2);
    switch (c->how) {
    case EXITS_AT_ONCE: _exit(0);
    case EXITS: exit(0);
    case RESETS: case SHUTS_WRITING_THEN_RESETS: {
        struct linger none = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    }
    /* fall through */
    case CLOSES: case SHUTS_WRITING_THEN_CLOSES: case SHUTS_READING_THEN_CLOSES: case SHUTS_BOTH_THEN_CLOSES:
        close(fd);
        tell(control);
        pause();
        _exit(0);
    default: raise(SIGKILL);
    }
}

/* Whether the mortal's process goes on after its end of the connection. */
static bool lives_on(int how) {
    switch (how) {
    case CLOSES: case RESETS: case SHUTS_WRITING_THEN_CLOSES: case SHUTS_READING_THEN_CLOSES: case SHUTS_BOTH_THEN_CLOSES:
    case SHUTS_WRITING_THEN_RESETS: return true;
    default: return false;
    }
}

static void set_timeout(int fd, int which, int ms) {
    struct timeval t = {ms / 1000, ms % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, which, &t, sizeof t);
}

static uint64_t sent_by_tcp(int fd) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    return info.tcpi_bytes_sent;
}

static uint64_t received_by_tcp(int fd) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    return info.tcpi_bytes_received;
}

static void one_call(char call, int fd, const int *sets) {
    char in[LAST * 2];
    bool sleeps = call < 'a';
    long r;
    struct epoll_event event = {0};
    switch (call | 32) {
    case 'p': case 'q': case 'w': {
        short wanted = (call | 32) == 'p' ? POLLIN | POLLOUT | POLLRDHUP : call == 'q' ? POLLOUT : 0;
        /* To sleep, only for what is not so already. */
        struct pollfd one = {fd, sleeps ? POLLIN | POLLRDHUP : wanted, 0};
        r = poll(&one, 1, sleeps ? -1 : 0);
        printf(" %c:%ld:%x", call, r, (unsigned short)one.revents);
        break;
    }
    case 'x': {
        fd_set set[3];
        for (int i = 0; i < 3; i++) {
            FD_ZERO(&set[i]);
            FD_SET(fd, &set[i]);
        }
        struct timeval now = {0, 0};
        r = select(fd + 1, &set[0], &set[1], &set[2], &now);
        printf(" x:%ld:%s%s%s", r, FD_ISSET(fd, &set[0]) ? "r" : "", FD_ISSET(fd, &set[1]) ? "w" : "", FD_ISSET(fd, &set[2]) ? "x" : "");
        break;
    }
    case 'r':
        r = recv(fd, in, sizeof in, sleeps ? 0 : MSG_DONTWAIT);
        printf(" %c:%ld", call, r < 0 ? (long)-errno : r);
        break;
    case 's':
        r = send(fd, "0123456789", 10, MSG_NOSIGNAL | (sleeps ? 0 : MSG_DONTWAIT));
        printf(" %c:%ld", call, r < 0 ? (long)-errno : r);
        break;
    case 'n': case 'm':
        fcntl(fd, F_SETFL, O_NONBLOCK);
        r = (call | 32) == 'n' ? recv(fd, in, sizeof in, 0) : send(fd, "0123456789", 10, MSG_NOSIGNAL);
        printf(" %c:%ld", call, r < 0 ? (long)-errno : r);
        fcntl(fd, F_SETFL, 0);
        break;
    case 'b': case 'd': {
        int which = (call | 32) == 'b' ? SO_RCVTIMEO : SO_SNDTIMEO;
        /* One that sleeps through the death must not end before it. */
        set_timeout(fd, which, sleeps ? 20000 : 30);
        r = which == SO_RCVTIMEO ? recv(fd, in, sizeof in, 0) : send(fd, "0123456789", 10, MSG_NOSIGNAL);
        printf(" %c:%ld", call, r < 0 ? (long)-errno : r);
        set_timeout(fd, which, 0);
        break;
    }
    case 'f': {
        int file = memfd_create("file", MFD_CLOEXEC);
        off_t from = 0;
        if (file < 0 || write(file, bytes, 10) != 10) fail("file");
        r = sendfile(fd, file, &from, 10);
        printf(" f:%ld", r < 0 ? (long)-errno : r);
        close(file);
        break;
    }
    case 'e': {
        int error = -1;
        socklen_t size = sizeof error;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        printf(" e:%d", error);
        break;
    }
    case 'l': case 't':
        r = epoll_wait(sets[(call | 32) == 't'], &event, 1, sleeps ? -1 : 0);
        printf(" %c:%ld:%x", call, r, event.events);
        break;
    }
}

static bool is_asked_for(const char *only, const struct death_case *c, int number) {
    size_t length = strlen(deaths[c->how]);
    if (only[0] >= '0' && only[0] <= '9') return atoi(only) == number;
    return strncmp(only, deaths[c->how], length) == 0 && only[length] == ':' && only[length + 1] == orders[c->order][0];
}

static void stay_on_this_core(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    if (sched_setaffinity(0, sizeof one, &one)) fail("sched_setaffinity");
}

/* Returns whether bytes that it has sent are not in its TCP socket. If it has filled the way, whether bytes have come by something else: the
 * kernel may have taken some of its own bytes and not sent them yet. */
static bool survive(const struct death_case *c, int number) {
    int control[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control)) fail("socketpair");
    bool accepts = number & 1, asleep = orders[c->order][0] < 'a';
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
        close(control[0]);
        mortal(c, control[1], !accepts, asleep);
    }
    close(control[1]);
    int fd = meet(control[0], accepts), sets[2];
    uint64_t sent = 0;
    char in[LAST];
    if (c->left == BY_TCP || c->left == BY_BOTH) {
        sent += (uint64_t)send(fd, bytes, SOME, 0);
        tell(control[0]);
    }
    for (int i = 0; i < ROUNDS; i++) {
        if (recv(fd, in, 1, 0) != 1) fail("round");
        pause_ms(i < 3);
        tell(control[0]);
    }
    hear(control[0]);
    if (c->left == ALL_READ || c->left == BY_RING || c->left == BY_BOTH) sent += (uint64_t)send(fd, bytes, SOME, 0);
    if (c->left == FULL)
        for (long n; (n = send(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0 || sent == 0;) sent += (uint64_t)n;
    tell(control[0]);
    hear(control[0]);
    if (c->own_end) shutdown(fd, SHUT_WR);
    for (int i = 0; i < 2; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (i ? EPOLLET : 0)};
        sets[i] = epoll_create1(EPOLL_CLOEXEC);
        epoll_ctl(sets[i], EPOLL_CTL_ADD, fd, &event);
        while (i && epoll_wait(sets[i], &event, 1, 0) > 0) {}
    }
    bool by_ring = c->left == FULL ? received_by_tcp(fd) < ROUNDS : sent_by_tcp(fd) < sent;
    printf("%d %s left=%s last=%d own-end=%d %s:", number, deaths[c->how], lefts[c->left], c->last, c->own_end, accepts ? "accepted" : "connected");
    tell(control[0]);
    bool lives = lives_on(c->how);
    int status;
    if (!asleep) {
        if (lives) hear(control[0]);
        else waitpid(child, &status, 0);
        pause_ms(2);
    }
    for (const char *call = orders[c->order]; *call; call++) {
        one_call(*call, fd, sets);
        if (asleep && call == orders[c->order]) {
            if (lives) hear(control[0]);
            else waitpid(child, &status, 0);
        }
        pause_ms(2);
    }
    printf("\n");
    if (lives) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    for (int i = 0; i < 2; i++) close(sets[i]);
    close(fd);
    close(control[0]);
    return by_ring;
}

int main(int count, char **values) {
    int stride = count > 1 ? atoi(values[1]) : 1, first = count > 2 ? atoi(values[2]) : 0, number = 0, ran = 0, by_ring = 0;
    const char *only = count > 3 ? values[3] : NULL;
    signal(SIGPIPE, SIG_IGN);
    if (only && strchr(only, ':')) stay_on_this_core();
    for (int how = 0; how < DEATHS; how++)
        for (int left = 0; left < LEFTS; left++)
            for (int last = 0; last < 2; last++)
                for (int own_end = 0; own_end < 2; own_end++)
                    for (int order = 0; order < ORDERS; order++) {
                        struct death_case c = {how, left, last, own_end, order};
                        char begin = orders[order][0];
                        /* What would not sleep, or for ever. */
                        if (begin < 'a' && (last || own_end)) continue;
                        if ((begin == 'S' || begin == 'D') && (left != FULL || how >= SHUTS_WRITING_THEN_KILLED)) continue;
                        /* Bytes that fill the way are not all taken by TCP before its end follows them. */
                        if (left == FULL && own_end) continue;
                        number++;
                        if (only ? !is_asked_for(only, &c, number) : number % stride != first) continue;
                        alarm(30);
                        by_ring += survive(&c, number);
                        ran++;
                    }
    printf("# %d of %d by ring\n", by_ring, ran);
    return 0;
}
