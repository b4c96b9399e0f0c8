/* Readiness: poll, select, epoll in its kinds, and signals that come while waiting. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

void say_events(char *to, size_t size, unsigned events) {
    static const struct { unsigned bit; const char *name; } names[] = {
        {POLLIN, "IN"}, {POLLOUT, "OUT"}, {POLLPRI, "PRI"}, {POLLERR, "ERR"}, {POLLHUP, "HUP"}, {POLLRDHUP, "RDHUP"},
        {POLLNVAL, "NVAL"}, {POLLRDNORM, "RDNORM"}, {POLLWRNORM, "WRNORM"},
    };
    int at = snprintf(to, size, "[");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (events & names[i].bit && at < (int)size) at += snprintf(to + at, size - (size_t)at, "%s%s", at > 1 ? "," : "", names[i].name);
    if (at < (int)size) snprintf(to + at, size - (size_t)at, "]");
}

static void do_poll(const struct step *s) {
    static const short masks[] = {POLLIN, POLLIN | POLLOUT, POLLOUT, POLLIN | POLLRDHUP, POLLIN | POLLPRI | POLLOUT | POLLRDHUP, 0};
    struct pollfd fds[SLOTS + 2];
    int slot_of[SLOTS + 2];
    nfds_t n = 0;
    for (int i = 0; i < SLOTS; i++)
        if (model.e[s->side].alive[i]) {
            slot_of[n] = i;
            fds[n++] = (struct pollfd){hands[s->side].fd[i], masks[((unsigned)s->flags >> (3 * i)) % 6], 0x55};
        }
    slot_of[n] = 8;
    fds[n++] = (struct pollfd){-1, POLLIN, 0x55};
    int timeout = s->call % 8 == 0 ? 3 : 0;
    struct timespec t = {0, timeout * 1000000};
    int r = s->call & 1 ? ppoll(fds, n, &t, NULL) : poll(fds, n, timeout);
    char text[300];
    int at = 0;
    for (nfds_t i = 0; i < n; i++) {
        char events[80];
        say_events(events, sizeof events, (unsigned short)fds[i].revents);
        at += snprintf(text + at, sizeof text - (size_t)at, " %d:%s", slot_of[i], events);
    }
    note(s, "-> %d%s", r, text);
}

static void do_select(const struct step *s) {
    fd_set set[3];
    int top = 0;
    for (int k = 0; k < 3; k++) FD_ZERO(&set[k]);
    for (int i = 0; i < SLOTS; i++) {
        int fd = hands[s->side].fd[i];
        if (!model.e[s->side].alive[i] || fd >= FD_SETSIZE) continue;
        for (int k = 0; k < 3; k++)
            if ((unsigned)s->flags >> (3 * i + k) & 1) FD_SET(fd, &set[k]);
        if (fd >= top) top = fd + 1;
    }
    int timeout = s->call % 8 == 0 ? 3 : 0, r;
    if (s->call & 1) {
        struct timespec t = {0, timeout * 1000000};
        r = pselect(top, &set[0], &set[1], &set[2], &t, NULL);
    } else {
        struct timeval t = {0, timeout * 1000};
        r = select(top, &set[0], s->call & 2 ? &set[1] : NULL, &set[2], &t);
        if (!(s->call & 2)) FD_ZERO(&set[1]);
    }
    char text[200] = "";
    int at = 0;
    for (int i = 0; i < SLOTS; i++) {
        int fd = hands[s->side].fd[i];
        if (!model.e[s->side].alive[i] || fd >= FD_SETSIZE) continue;
        at += snprintf(text + at, sizeof text - (size_t)at, " %d:%s%s%s", i, FD_ISSET(fd, &set[0]) ? "r" : "", FD_ISSET(fd, &set[1]) ? "w" : "",
                       FD_ISSET(fd, &set[2]) ? "x" : "");
    }
    note(s, "-> %d%s", r, text);
}

static void do_watch(const struct step *s) {
    int set = s->call & 1, fd = hands[s->side].fd[s->slot];
    bool is_in = model.e[s->side].watch[set][s->slot];
    struct epoll_event event = {.events = (uint32_t)s->flags, .data.u32 = (uint32_t)s->slot};
    char wrong[40] = "";
    if (s->bits % 8 == 0) {
        int r = epoll_ctl(hands[s->side].set[set], is_in ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
        snprintf(wrong, sizeof wrong, " (wrong: %d errno=%d)", r, errno);
    }
    int op = s->flags == 0 ? EPOLL_CTL_DEL : is_in ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    int r = epoll_ctl(hands[s->side].set[set], op, fd, &event);
    note(s, "%d set=%d op=%d events=%x -> %d%s", s->slot, set, op, (unsigned)s->flags, r, wrong);
}

static void do_harvest(const struct step *s) {
    int set = s->call & 1, epoll = hands[s->side].set[set];
    struct epoll_event events[8];
    char nested[40] = "";
    if (set == 0 && s->bits % 4 == 0) {
        struct pollfd outer = {epoll, POLLIN, 0};
        int r = poll(&outer, 1, 0);
        snprintf(nested, sizeof nested, " nested=%d", r);
    }
    int timeout = s->call % 8 == 0 ? 3 : 0, r;
    struct timespec t = {0, timeout * 1000000};
    switch ((s->call >> 1) % 3) {
    case 0: r = epoll_wait(epoll, events, 8, timeout); break;
    case 1: r = epoll_pwait(epoll, events, 8, timeout, NULL); break;
    default: r = epoll_pwait2(epoll, events, 8, &t, NULL);
    }
    unsigned of[SLOTS] = {0};
    int odd = 0;
    for (int i = 0; i < r; i++) {
        if (events[i].data.u32 >= SLOTS || of[events[i].data.u32]) odd++;
        else of[events[i].data.u32] = events[i].events;
    }
    /* Of an edge-triggered set, what is true now is told as well: an edge more than the kernel gives is allowed if it is true. */
    char text[500] = "", event[80];
    int at = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (!model.e[s->side].watch[set][i]) continue;
        say_events(event, sizeof event, of[i]);
        at += snprintf(text + at, sizeof text - (size_t)at, " %d:%s", i, event);
        if (set == 1) {
            struct pollfd now = {hands[s->side].fd[i], (short)(model.e[s->side].watch[set][i] & 0xffff), 0};
            poll(&now, 1, 0);
            say_events(event, sizeof event, (unsigned short)now.revents);
            at += snprintf(text + at, sizeof text - (size_t)at, "~%s", event);
        }
    }
    if (set == 0) note(s, "level -> %d odd=%d%s%s", r, odd, text, nested);
    else note(s, "edge odd=%d%s", odd, text);
}

/* Waits until `fd` is readable, in one of several ways; 1 if it is, 0 after the time, -1 with errno. */
int wait_readable(int fd, int how, int timeout_ms, unsigned *events) {
    *events = 0;
    switch (how % 4) {
    case 0: {
        struct pollfd p = {fd, POLLIN, 0};
        int r = poll(&p, 1, timeout_ms);
        *events = (unsigned short)p.revents;
        return r;
    }
    case 1: {
        fd_set in;
        struct timeval t = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
        FD_ZERO(&in);
        FD_SET(fd, &in);
        int r = select(fd + 1, &in, NULL, NULL, &t);
        *events = r > 0 && FD_ISSET(fd, &in) ? POLLIN : 0;
        return r;
    }
    default: {
        int set = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN | (how % 4 == 3 ? EPOLLET : 0)};
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
        int r = epoll_wait(set, &event, 1, timeout_ms), e = errno;
        if (r > 0) *events = event.events;
        close(set);
        errno = e;
        return r;
    }
    }
}

static void do_interrupt(const struct step *s) {
    int fd = hands[s->side].fd[s->slot];
    timer_t timer;
    struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    struct itimerspec every = {{0, 4000000}, {0, 4000000}};
    if (timer_create(CLOCK_MONOTONIC, &how, &timer) || timer_settime(timer, 0, &every, NULL)) return;
    int r, before = user_signals;
    unsigned events;
    switch (s->call % 6) {
    case 0: r = (int)read(fd, buffer, 100); break;
    case 1: r = (int)recv(fd, buffer, 100, MSG_WAITALL); break;
    case 2: r = (int)recvmsg(fd, &(struct msghdr){.msg_iov = &(struct iovec){buffer, 10}, .msg_iovlen = 1}, MSG_PEEK); break;
    default: r = wait_readable(fd, s->call, 5000, &events);
    }
    int e = errno;
    timer_delete(timer);
    note(s, "%d by=%d -> %d errno=%d signals=%d", s->slot, s->call % 6, r, r < 0 ? e : 0, user_signals > before);
}

void act_waiting(const struct step *s) {
    switch (s->kind) {
    case POLL: do_poll(s); break;
    case SELECT: do_select(s); break;
    case WATCH: do_watch(s); break;
    case HARVEST: do_harvest(s); break;
    case INTERRUPT: do_interrupt(s); break;
    default: break;
    }
}
