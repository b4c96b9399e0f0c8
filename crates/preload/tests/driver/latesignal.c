// A library behind Partywall's: raises SIGUSR1 in a thread that is about to sleep, as late as a program can: when Partywall's library has looked at
// its rings, and calls the kernel. `late_signal_next` asks for one such signal; `late_signal_sent` returns how many were raised in sleeps of
// `epoll`, and of `poll`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <time.h>

static atomic_int wanted, in_epoll, in_poll;

void late_signal_next(void) { atomic_store(&wanted, 1); }

int late_signal_sent(int by_poll) { return atomic_load(by_poll ? &in_poll : &in_epoll); }

static void before_sleep(atomic_int *count) {
    if (!atomic_exchange(&wanted, 0)) return;
    atomic_fetch_add(count, 1);
    raise(SIGUSR1);
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name);

int epoll_pwait(int set, struct epoll_event *events, int max, int timeout, const sigset_t *mask) {
    NEXT(epoll_pwait)
    if (timeout) before_sleep(&in_epoll);
    return next(set, events, max, timeout, mask);
}

int epoll_pwait2(int set, struct epoll_event *events, int max, const struct timespec *timeout, const sigset_t *mask) {
    NEXT(epoll_pwait2)
    if (!timeout || timeout->tv_sec || timeout->tv_nsec) before_sleep(&in_epoll);
    return next(set, events, max, timeout, mask);
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    NEXT(ppoll)
    if (!timeout || timeout->tv_sec || timeout->tv_nsec) before_sleep(&in_poll);
    return next(fds, count, timeout, mask);
}
