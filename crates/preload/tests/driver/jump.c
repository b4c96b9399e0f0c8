// A program that jumps out of a signal handler while a call is copying, as programs do that give calls a deadline by SIGALRM.
//
//   jump sink PORT    takes connections one after the other, and what comes by them
//   jump out PORT     sends large buffers with a timer running; after each jump sends one more byte without it. Says how often that
//                     went well, how often the connection had ended, and how often it was refused as if the socket were full
//   jump wait PORT    jumps out of calls that wait in the kernel, on a connection that has no ring yet. Says whether it has got one afterwards
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 16 << 20, JUMPS = 300 };

static sigjmp_buf back;
static volatile sig_atomic_t armed;

static void on_alarm(int signal) {
    (void)signal;
    if (armed) {
        armed = 0;
        siglongjmp(back, 1);
    }
}

static void set_timer(int microseconds) {
    struct itimerval timer = {.it_value = {.tv_usec = microseconds}};
    setitimer(ITIMER_REAL, &timer, 0);
}

static struct sockaddr_in at = {.sin_family = AF_INET};

static int connect_again(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) exit(3);
    // Until it goes by a ring: a thread that has jumped out of the kernel's call counts as sleeping there.
    for (int i = 0; i < 100; ++i) {
        if (send(fd, "x", 1, 0) != 1) exit(5);
        usleep(1000);
    }
    return fd;
}

// The bytes that TCP has got: those that it has sent, and those that wait there.
static long given_to_tcp(int fd) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    return (long)(info.tcpi_bytes_sent + info.tcpi_notsent_bytes);
}

// Whether a process waits in the kernel for something to come by this connection. (Polls of the library have limits.)
static int waits(pid_t process, int fd) {
    char path[40], line[200] = "";
    snprintf(path, sizeof path, "/proc/%d/syscall", process);
    int file = open(path, O_RDONLY);
    if (file < 0) exit(7);
    long got = read(file, line, sizeof line - 1), number = -1;
    unsigned long first = 0, second = 0, third = 1;
    close(file);
    if (got <= 0 || sscanf(line, "%ld %lx %lx %lx", &number, &first, &second, &third) < 4) return 0;
#ifdef SYS_poll
    if (number == SYS_poll) return (int)third == -1;
#endif
    return number == SYS_ppoll ? third == 0 : number == SYS_recvfrom && first == (unsigned long)fd;
}

// A process that sends its parent SIGALRM for each descriptor that comes by a pipe, once the parent waits for that one. Returns the end to write to.
static int start_alarms(void) {
    int ends[2];
    if (pipe(ends)) exit(8);
    pid_t parent = getpid();
    if (fork() == 0) {
        close(ends[1]);
        for (int fd; read(ends[0], &fd, sizeof fd) == sizeof fd; kill(parent, SIGALRM))
            while (!waits(parent, fd)) usleep(1000);
        _exit(0);
    }
    close(ends[0]);
    return ends[1];
}

// Not inlined: local variables of a function that calls `sigsetjmp` may change by a jump.
__attribute__((noinline)) static void jump_out_of(int polls, int fd, int alarms) {
    if (sigsetjmp(back, 1)) return;
    armed = 1;
    if (write(alarms, &fd, sizeof fd) != sizeof fd) exit(8);
    char byte;
    struct pollfd one = {fd, POLLIN, 0};
    // Nothing ever comes.
    if (polls) poll(&one, 1, -1); else recv(fd, &byte, 1, 0);
    exit(6);
}

static int wait_and_jump(void) {
    int alarms = start_alarms(), fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) return 3;
    for (int jumps = 0; jumps < 4; ++jumps) jump_out_of(jumps % 2, fd, alarms);
    close(alarms);
    // Until TCP does not get a byte. The limit is a guard against hanging.
    for (time_t limit = time(0) + 60; time(0) < limit; usleep(1000)) {
        long before = given_to_tcp(fd);
        if (send(fd, "x", 1, 0) != 1) return 5;
        if (given_to_tcp(fd) == before) {
            puts("ring");
            return 0;
        }
    }
    puts("tcp");
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    at.sin_port = htons((uint16_t)atoi(argv[2]));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    static char buffer[BYTES];
    if (!strcmp(argv[1], "sink")) {
        int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 8)) return 4;
        puts("ready");
        fflush(stdout);
        for (;;) {
            int fd = accept(listener, 0, 0);
            while (recv(fd, buffer, BYTES, 0) > 0) {}
            close(fd);
        }
    }
    signal(SIGALRM, on_alarm);
    signal(SIGPIPE, SIG_IGN);
    if (!strcmp(argv[1], "wait")) return wait_and_jump();
    volatile int fd = connect_again(), well = 0, ended = 0, locked = 0;
    for (volatile int jumps = 0; jumps < JUMPS;) {
        if (sigsetjmp(back, 1) == 0) {
            armed = 1;
            set_timer(300 + jumps % 50 * 20);
            while (armed && send(fd, buffer, BYTES, 0) > 0) {}
            armed = 0;
        } else {
            ++jumps;
        }
        set_timer(0);
        if (send(fd, buffer, 1, 0) == 1) {
            ++well;
            continue;
        }
        if (errno == EAGAIN) ++locked; else ++ended;
        close(fd);
        fd = connect_again();
    }
    printf("well %d ended %d locked %d\n", well, ended, locked);
    return 0;
}
