// A program that waits for a connection, and whose signal handler waits for the same connection just before the wait sleeps (latesignal.c).
//
//   latewait serve PORT         answers each byte, slowly
//   latewait CALL HOW INSTALL PORT
//                               waits by CALL, with a handler that waits by HOW and was installed by INSTALL. Says how many waits missed the answer,
//                               and how many signals were raised before a sleep by `epoll`, and by `poll`
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Provided by latesignal.c.
void late_signal_next(void) __attribute__((weak));
int late_signal_sent(int by_poll) __attribute__((weak));

enum { ROUNDS = 5, LONGEST = 10000, ANSWER = 20000 };

static int fd, set, pipes[2];
static const char *how;
static volatile sig_atomic_t failed;

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static int wait_in_set(int timeout) {
    struct epoll_event event;
    return epoll_wait(set, &event, 1, timeout);
}

static int wait_by_poll(int others, int timeout) {
    struct pollfd fds[2] = {{.fd = fd, .events = POLLIN}, {.fd = pipes[0], .events = POLLIN}};
    return poll(fds, 1 + others, timeout);
}

static int wait_by_select(void) {
    fd_set in;
    FD_ZERO(&in);
    FD_SET(fd, &in);
    FD_SET(pipes[0], &in);
    struct timeval time = {.tv_sec = LONGEST / 1000};
    return select((fd > pipes[0] ? fd : pipes[0]) + 1, &in, 0, 0, &time);
}

static void on_user(int number) {
    (void)number;
    int error = errno;
    char byte = 'a';
    int n = -1;
    // The answer comes while the handler sleeps, and stays for the interrupted call.
    if (send(fd, &byte, 1, MSG_NOSIGNAL) == 1) {
        if (!strcmp(how, "recv")) n = (int)recv(fd, &byte, 1, MSG_PEEK);
        if (!strcmp(how, "poll")) n = wait_by_poll(0, LONGEST);
        if (!strcmp(how, "epoll")) n = wait_in_set(LONGEST);
    }
    if (n != 1) ++failed;
    errno = error;
}

// As the kernel has it.
struct kernel_action {
    void (*handler)(int);
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};

#ifdef __x86_64__
enum { SA_RESTORER = 0x04000000 };
__attribute__((naked)) static void restore(void) { __asm__("movl $15, %eax\n syscall"); }
#else
enum { SA_RESTORER = 0 };
static void restore(void) {}
#endif

// `sigset` is deprecated, and programs use it.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static void install(const char *by) {
    struct sigaction action = {.sa_handler = on_user};
    if (!strcmp(by, "sigaction")) sigaction(SIGUSR1, &action, 0);
    if (!strcmp(by, "signal")) signal(SIGUSR1, on_user);
    if (!strcmp(by, "sysv_signal")) sysv_signal(SIGUSR1, on_user);
    if (!strcmp(by, "sigset")) sigset(SIGUSR1, on_user);
    if (!strcmp(by, "syscall")) syscall(SYS_rt_sigaction, SIGUSR1, &(struct kernel_action){on_user, SA_RESTORER, restore, 0}, 0, 8);
}

static int wait_by(const char *call) {
    char byte;
    if (!strcmp(call, "recv")) return (int)recv(fd, &byte, 1, MSG_PEEK);
    if (!strcmp(call, "poll")) return wait_by_poll(0, LONGEST);
    if (!strcmp(call, "poll2")) return wait_by_poll(1, LONGEST);
    if (!strcmp(call, "select")) return wait_by_select();
    if (!strcmp(call, "epoll")) return wait_in_set(LONGEST);
    struct epoll_event event;
    struct timespec time = {.tv_sec = LONGEST / 1000};
    if (!strcmp(call, "epoll2")) return epoll_pwait2(set, &event, 1, &time, 0);
    exit(2);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[argc - 1]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    char byte = 'a';
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!strcmp(argv[1], "serve")) {
        int listener = fd, one = 1;
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 8)) return 4;
        puts("ready");
        fflush(stdout);
        fd = accept(listener, 0, 0);
        while (recv(fd, &byte, 1, 0) == 1) {
            // Longer than a waiting thread stays awake.
            usleep(ANSWER);
            if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1) return 5;
        }
        return 0;
    }
    if (argc != 5 || !late_signal_next || !late_signal_sent) return 2;
    how = argv[2];
    if (connect(fd, (struct sockaddr *)&at, sizeof at) || pipe(pipes)) return 3;
    struct timeval time = {.tv_sec = LONGEST / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    if (strstr(argv[1], "epoll") || strstr(how, "epoll")) {
        struct epoll_event event = {.events = EPOLLIN};
        set = epoll_create1(0);
        if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event)) return 3;
    }
    // Until it goes by a ring.
    for (int i = 0; i < 20; ++i)
        if (send(fd, &byte, 1, 0) != 1 || recv(fd, &byte, 1, 0) != 1) return 5;
    int missed = 0;
    for (int i = 0; i < ROUNDS && !missed; ++i) {
        install(argv[3]);
        late_signal_next();
        // The call fails with EINTR, or sees the answer. One that sees it only at the end of its time has missed it.
        long start = now();
        int n = wait_by(argv[1]);
        if ((n != 1 && (n == 0 || errno != EINTR)) || now() - start >= LONGEST) ++missed;
        if (recv(fd, &byte, 1, 0) != 1) return 6;
    }
    printf("missed %d, failed %d, in epoll %d, in poll %d\n", missed, failed, late_signal_sent(0), late_signal_sent(1));
    return 0;
}
