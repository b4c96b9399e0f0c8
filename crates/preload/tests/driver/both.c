/* What takes both sides at once: meeting, long transfers, sleeping until the other does something, full buffers. */
#define _GNU_SOURCE
#include "driver.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

extern int me;  /* which end this process has, if there are two */

static bool mine(int side) { return !two_processes || me == side; }

/* A listener; `at` becomes the address to connect to. Which family is the seed's choice. */
static int listen_somewhere(unsigned kind, struct sockaddr_storage *at) {
    int six = kind % 3 != 0;
    int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (kind % 3 == 2) a6.sin6_addr = in6addr_any;
    if (kind % 7 == 0) a4.sin_addr.s_addr = htonl(INADDR_ANY);
    int r = six ? bind(fd, (struct sockaddr *)&a6, sizeof a6) : bind(fd, (struct sockaddr *)&a4, sizeof a4);
    if (r || listen(fd, 5)) return -1;
    socklen_t size = sizeof *at;
    getsockname(fd, (struct sockaddr *)at, &size);
    return fd;
}

/* Enters a socket into sets before it is connected, and says what they report then. */
static void enter_before(const struct step *s, int fd, char *to, size_t size) {
    for (int set = 0; set < 2; set++) {
        uint32_t events = (uint32_t)(set ? s->call : s->flags);
        struct epoll_event event = {.events = events, .data.u32 = 0};
        if (!events) continue;
        int entered = epoll_ctl(hands[0].set[set], EPOLL_CTL_ADD, fd, &event), at = (int)strlen(to), n = 0;
        if (s->slot2) n = epoll_wait(hands[0].set[set], &event, 1, 0);
        snprintf(to + at, size - (size_t)at, ", set=%d events=%x -> %d: %d %x", set, events, entered, n, n > 0 ? event.events : 0);
    }
}

/* Connects to the listener's port: over IPv6, IPv4, or IPv4 to a listener of both. `said` gets what sets reported before that. */
static int connect_there(const struct step *s, unsigned kind, uint16_t port, unsigned bits, char *said, size_t size) {
    struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback, .sin6_port = port};
    struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port};
    int six = kind % 3 == 1, patient = bits & 1;
    int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | (patient ? 0 : SOCK_NONBLOCK), 0);
    enter_before(s, fd, said, size);
    int r = six ? connect(fd, (struct sockaddr *)&a6, sizeof a6) : connect(fd, (struct sockaddr *)&a4, sizeof a4);
    if (r && errno == EINPROGRESS) {
        struct pollfd p = {fd, POLLOUT, 0};
        int error = 1;
        socklen_t length = sizeof error;
        poll(&p, 1, 5000);
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
        r = error ? -1 : 0;
    }
    if (!patient) fcntl(fd, F_SETFL, O_RDWR);
    return r ? -1 : fd;
}

static int accept_one(int listener, unsigned bits) {
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    if (bits & 2) {
        struct pollfd p = {listener, POLLIN, 0};
        poll(&p, 1, 5000);
    }
    int fd;
    switch (bits >> 2 & 3) {
    case 0: return accept(listener, NULL, NULL);
    case 1: return accept(listener, (struct sockaddr *)&from, &size);
    case 2: return accept4(listener, (struct sockaddr *)&from, &size, 0);
    default:
        fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
        fcntl(fd, F_SETFL, O_RDWR);
        return fd;
    }
}

static void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void do_connect(const struct step *s) {
    unsigned kind = s->bits >> 8;
    struct sockaddr_storage at;
    int listener = -1;
    uint64_t port = 0;
    model.episode++;
    if (mine(1)) {
        listener = listen_somewhere(kind, &at);
        port = listener < 0 ? 0 : ((struct sockaddr_in *)&at)->sin_port;
        if (two_processes) tell(port);
    }
    if (mine(0)) {
        if (two_processes) port = hear();
        char said[200] = "";
        int fd = connect_there(s, kind, (uint16_t)port, s->bits, said, sizeof said);
        no_delay(fd);
        /* Something may be under way before the other side knows of the connection. */
        fill_pattern(buffer, 0, 0, s->n);
        long sent = s->n ? send(fd, buffer, s->n, 0) : 0;
        for (int i = 0; i < SLOTS; i++) hands[0].fd[i] = -1;
        hands[0].fd[0] = fd;
        note_as(s, 0, "kind=%u %s, sent %ld%s", kind % 3, fd < 0 ? "FAILED" : "ok", sent, said);
        if (two_processes) tell(0);
    }
    if (mine(1)) {
        if (two_processes) hear();
        int fd = accept_one(listener, s->bits);
        no_delay(fd);
        for (int i = 0; i < SLOTS; i++) hands[1].fd[i] = -1;
        hands[1].fd[0] = fd;
        close(listener);
        note_as(s, 1, "accepted %s", fd < 0 ? "FAILED" : "ok");
    }
    model.episode--;
}

static void wait_writable(int fd) {
    struct pollfd p = {fd, POLLOUT, 0};
    poll(&p, 1, 10000);
}

/* Sends `n` bytes that begin at `from` in pieces by all kinds of calls; how many went. */
static uint64_t pour(int fd, int side, uint64_t from, uint64_t n, struct rng *r) {
    static unsigned char bytes[70000];
    uint64_t done = 0;
    while (done < n) {
        size_t part = 1 + below(r, below(r, 2) ? 2000 : 65000);
        if (part > n - done) part = n - done;
        fill_pattern(bytes, side, from + done, part);
        long sent = send_by((int)roll(r) & 63, fd, bytes, part, MSG_NOSIGNAL, roll(r));
        if (sent < 0 && errno == EAGAIN) wait_writable(fd);
        else if (sent < 0) return done;
        else done += (uint64_t)sent;
    }
    return done;
}

/* Receives `n` bytes likewise; `*wrong` is where the first wrong one is, or -1. */
static uint64_t draw(int fd, int from_side, uint64_t from, uint64_t n, struct rng *r, long *wrong) {
    static unsigned char bytes[70000];
    char more[100];
    uint64_t done = 0;
    unsigned events;
    *wrong = -1;
    while (done < n) {
        size_t part = 1 + below(r, below(r, 2) ? 2000 : 65000);
        if (part > n - done) part = n - done;
        int wait = below(r, 8) == 0, flags = below(r, 4) ? 0 : MSG_DONTWAIT;
        if (wait) wait_readable(fd, (int)roll(r) & 3, 10000, &events);
        long got = recv_by((int)roll(r) & 63, fd, bytes, part, flags, roll(r), more, sizeof more);
        if (got < 0 && errno == EAGAIN) {
            wait_readable(fd, (int)roll(r) & 3, 10000, &events);
            continue;
        }
        if (got <= 0) break;
        long at = differs(bytes, from_side, from + done, (size_t)got);
        if (at >= 0 && *wrong < 0) *wrong = (long)done + at;
        done += (uint64_t)got;
    }
    return done;
}

static void do_bulk(const struct step *s) {
    struct end *e = &model.e[s->side], *peer = &model.e[!s->side];
    struct rng r = {s->bits};
    if (two_processes) {
        if (me == s->side) {
            uint64_t sent = pour(hands[me].fd[s->slot], s->side, e->sent, s->n, &r);
            note_as(s, me, "n=%zu sent %lu", s->n, sent);
            tell(0);
        } else {
            long wrong;
            roll(&r);
            uint64_t n = e->sent + s->n - peer->got;
            uint64_t got = draw(hands[me].fd[s->slot2], s->side, peer->got, n, &r, &wrong);
            hear();
            note_as(s, me, "n=%lu got %lu wrong=%ld", n, got, wrong);
        }
        return;
    }
    static unsigned char bytes[70000];
    uint64_t sent = 0, got = 0, n = e->sent + s->n - peer->got;
    long wrong = -1;
    while (got < n) {
        size_t part = 1 + below(&r, 65000);
        if (part > s->n - sent) part = s->n - sent;
        fill_pattern(bytes, s->side, e->sent + sent, part);
        long w = part ? send(hands[s->side].fd[s->slot], bytes, part, MSG_DONTWAIT) : 0;
        if (w > 0) sent += (uint64_t)w;
        else if (w < 0 && errno != EAGAIN) break;
        part = 1 + below(&r, 65000);
        long got_now = recv(hands[!s->side].fd[s->slot2], bytes, part < n - got ? part : n - got, MSG_DONTWAIT);
        if (got_now == 0 || (got_now < 0 && errno != EAGAIN)) break;
        if (got_now < 0) continue;
        long at = differs(bytes, s->side, peer->got + got, (size_t)got_now);
        if (at >= 0 && wrong < 0) wrong = (long)got + at;
        got += (uint64_t)got_now;
    }
    note_as(s, s->side, "n=%zu sent %lu got %lu wrong=%ld", s->n, sent, got, wrong);
}

static void on_restart(int signal) { (void)signal; user_signals++; }

static void sleeper(const struct step *s) {
    int fd = hands[s->side].fd[s->slot], how = s->flags % 8;
    struct end *e = &model.e[s->side];
    bool waits = e->nonblocking || e->timeout_ms;
    timer_t timer;
    struct sigaction old;
    uint64_t got = 0;
    long r = 0;
    unsigned events = 0;
    if (how == 6) {
        struct sigaction restart = {.sa_handler = on_restart, .sa_flags = SA_RESTART};
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        struct itimerspec every = {{0, 700000}, {0, 700000}};
        sigaction(SIGUSR1, &restart, &old);
        timer_create(CLOCK_MONOTONIC, &event, &timer);
        timer_settime(timer, 0, &every, NULL);
    }
    tell(1);
    if (how == 1 && !waits) {
        r = recv(fd, buffer, s->n, MSG_WAITALL);
        got = r > 0 ? (uint64_t)r : 0;
    } else {
        /* By reads alone, or by waiting and reading; until everything is there. */
        bool by_waiting = waits || (how >= 2 && how <= 5) || (how == 7 && s->bits & 4);
        do {
            /* Waiting is never restarted after a signal, and neither is reading with a timeout. */
            do r = by_waiting ? wait_readable(fd, how, 10000, &events) : 1;
            while (r < 0 && errno == EINTR);
            if (r > 0) r = recv(fd, buffer + got, how == 7 ? 100 : s->n - got, 0);
            if (r > 0) got += (uint64_t)r;
        } while (got < s->n && (r > 0 || (r < 0 && waits && errno == EINTR)));
    }
    int error = errno;
    if (how == 6) {
        timer_delete(timer);
        sigaction(SIGUSR1, &old, NULL);
    }
    note_as(s, s->side, "how=%d -> %ld got=%lu errno=%d events=%x wrong=%ld", how, how == 7 || (how == 1 && !waits) ? r : r > 0, got, r < 0 ? error : 0, events & POLLIN,
            differs(buffer, !s->side, e->got, got));
}

static void waker(const struct step *s) {
    int side = !s->side, fd = hands[side].fd[s->slot2];
    struct timespec pause = {0, 200000 + (long)(s->bits >> 4) % 2500000};
    fill_pattern(buffer, side, model.e[side].sent, s->n);
    hear();
    nanosleep(&pause, NULL);
    long r = 0;
    if (s->flags % 8 == 7) {
        r = shutdown(fd, SHUT_WR);
    } else {
        size_t first = s->bits & 1 ? s->n / 2 : 0;
        if (first) r = send_by((int)(s->bits >> 12) & 63, fd, buffer, first, 0, s->bits);
        if (first) nanosleep(&pause, NULL);
        long rest = send_by((int)(s->bits >> 18) & 63, fd, buffer + first, s->n - first, 0, s->bits);
        r = r < 0 || rest < 0 ? -1 : r + rest;
    }
    hear();
    note_as(s, side, "woke by %ld of %zu", r, s->n);
}

static void do_sleep(const struct step *s) {
    if (me == s->side) {
        sleeper(s);
        tell(2);
    } else {
        waker(s);
    }
}

/* Writes until nothing more goes in, lets the other side read all of it, and waits for the notice that there is room. */
static void do_fill(const struct step *s) {
    int writer = !s->side, set = -1;
    uint64_t n = 0;
    struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
    int fd = hands[writer].fd[s->slot2];
    if (mine(writer)) {
        static unsigned char bytes[8192];
        set = epoll_create1(EPOLL_CLOEXEC);
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
        int at_first = epoll_wait(set, &event, 1, 0), again = epoll_wait(set, &event, 1, 0);
        long r;
        do {
            fill_pattern(bytes, writer, model.e[writer].sent + n, sizeof bytes);
            r = send(fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (r > 0) n += (uint64_t)r;
        } while (r > 0 && n < (256u << 20));
        note_as(s, writer, "first=%d again=%d full: %ld errno=%d", at_first, again, r, r < 0 ? errno : 0);
        if (two_processes) tell(n);
    }
    if (mine(s->side)) {
        if (two_processes) n = hear();
        struct rng r = {s->bits};
        long wrong;
        uint64_t got = draw(hands[s->side].fd[s->slot], writer, model.e[writer].sent, n, &r, &wrong);
        note_as(s, s->side, "%s wrong=%ld", got == n ? "read all" : "LOST", wrong);
        if (two_processes) tell(0);
    }
    if (mine(writer)) {
        if (two_processes) hear();
        int r = epoll_wait(set, &event, 1, 10000);
        struct pollfd p = {fd, POLLOUT, 0};
        int polled = poll(&p, 1, 0);
        note_as(s, writer, "room: %d %x, poll %d %x", r, event.events, polled, (unsigned)p.revents);
        close(set);
    }
}

void act_both(const struct step *s) {
    switch (s->kind) {
    case CONNECT: do_connect(s); break;
    case BULK: do_bulk(s); break;
    case SLEEP: do_sleep(s); break;
    case FILL: do_fill(s); break;
    default: break;
    }
}
