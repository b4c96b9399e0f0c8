// A program whose child gives up its rights and then writes over all memory that it shares with its parent.
//
//   scribble later PORT COUNT       connects to an echo server; forks a child that scribbles as another user; makes COUNT further
//                                   connections, and says over how many of them all bytes came back as they were sent
//   scribble inherited PORT ROUNDS  in each round makes connections, forks such a child, and goes on with these connections: sends,
//                                   receives, waits, closes. Calls may fail. Says how many rounds it got through, and whether a new
//                                   connection carries afterwards
//   scribble set PORT COUNT         makes an epoll set, forks such a child, puts a connection into another set, forks a child that does
//                                   nothing, and says by which way COUNT exchanges went that waited in that set
//
// Each mode fails unless the child has found memory to write to.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 40000, ROUNDS = 20, CONNECTIONS = 16, MOMENT_MS = 120 };

static void limit_calls(int fd, struct timeval limit) {
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

static int open_connection(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    limit_calls(fd, (struct timeval){.tv_sec = 20});
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) exit(3);
    return fd;
}

// Whether what is sent comes back.
static int carries(int fd, unsigned seed, int rounds) {
    static unsigned char sent[BYTES], came[BYTES];
    for (int round = 0; round < rounds; ++round) {
        for (int i = 0; i < BYTES; ++i) sent[i] = (unsigned char)((seed = seed * 1103515245 + 12345) >> 16);
        for (int done = 0; done < BYTES;) {
            ssize_t n = send(fd, sent + done, (size_t)(BYTES - done), MSG_NOSIGNAL);
            if (n <= 0) return 0;
            done += (int)n;
        }
        for (int done = 0; done < BYTES;) {
            ssize_t n = recv(fd, came + done, (size_t)(BYTES - done), 0);
            if (n <= 0) return 0;
            done += (int)n;
        }
        if (memcmp(sent, came, BYTES)) return 0;
    }
    return 1;
}

struct area { uint64_t *from; size_t words; } areas[256];

// Memory that is shared by fork: /proc/self/maps calls it "/dev/zero (deleted)". With `regions` also the control pages of the rings.
static int find_areas(size_t most, int regions) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int count = 0, shared = 0;
    while (maps && fgets(line, sizeof line, maps) && count < 256) {
        unsigned long from, to;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3 || strcmp(rights, "rw-s")) continue;
        int is_shared = strstr(line, "/dev/zero") != 0;
        size_t len = to - from, limit = is_shared ? most : 4096;
        shared += is_shared;
        if (is_shared || (regions && strstr(line, "/memfd:")))
            areas[count++] = (struct area){(uint64_t *)from, (len < limit ? len : limit) / 8};
    }
    if (maps) fclose(maps);
    return shared ? count : 0;
}

// Blocks in use are near the beginning.
static void scribble(int told, size_t most, int regions, unsigned seed) {
    // Mapped already in the parent: what it shares with us now is what it had then.
    int count = find_areas(most, regions);
    if (setgid(65534) || setuid(65534)) _exit(5);
    // It ends with its parent, and does not keep the parent's output open.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(STDOUT_FILENO);
    if (write(told, &count, sizeof count) != sizeof count || !count) _exit(6);
    for (;;)
        for (int i = 0; i < count; ++i)
            for (size_t at = 0; at < areas[i].words; ++at) {
                seed = seed * 1103515245 + 12345;
                if (seed >> 30) continue;
                uint64_t some = seed >> 8 & 0xffffff;
                volatile uint64_t *word = &areas[i].from[at];
                switch (seed >> 4 & 7) {
                case 0: *word = 0; break;
                // A lock whose word is the number of a thread that lives is waited for: small numbers are rare.
                case 1: *word = some >> 8 & 7 ? some : some & 7; break;
                case 2: *word = UINT64_MAX; break;
                case 3: *word ^= 1ull << (some & 63); break;
                case 4: *word += some & 0xffff; break;
                case 5: *word = some * 0x100000001; break;
                case 6: *word = some << 40 | some; break;
                default: *word = some;
                }
            }
}

// Returns once the child writes.
static pid_t start_child(size_t most, int regions, unsigned seed) {
    int told[2], count = 0;
    if (pipe(told)) exit(7);
    pid_t child = fork();
    if (child == 0) scribble(told[1], most, regions, seed);
    close(told[1]);
    if (read(told[0], &count, sizeof count) != sizeof count || count <= 0) {
        fprintf(stderr, "the child found no memory to write to\n");
        exit(8);
    }
    close(told[0]);
    return child;
}

static int inherited[CONNECTIONS];
static volatile int over;

// One thread sends while the other receives: both have every connection.
static void *send_all_the_time(void *unused) {
    static char bytes[BYTES];
    for (unsigned n = 1; !over; n = n * 1103515245 + 12345) {
        int fd = inherited[n >> 8 & (CONNECTIONS - 1)], flags = MSG_NOSIGNAL | (n >> 16 & 3 ? MSG_DONTWAIT : 0);
        size_t len = n >> 18 & 1 ? BYTES : n >> 19 & 1023;
        struct pollfd one = {.fd = fd, .events = POLLIN | POLLOUT};
        send(fd, bytes, len, flags | (n >> 20 & 7 ? 0 : MSG_MORE));
        if (!(n >> 12 & 15)) poll(&one, 1, 1);
        if (!(n >> 12 & 31)) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    }
    return unused;
}

static void *receive_all_the_time(void *unused) {
    static char bytes[BYTES];
    for (unsigned n = 7; !over; n = n * 1103515245 + 12345) {
        int fd = inherited[n >> 8 & (CONNECTIONS - 1)], waiting;
        struct iovec parts[2] = {{bytes, 100}, {bytes + 100, BYTES - 100}};
        if (!(n >> 12 & 7)) ioctl(fd, FIONREAD, &waiting);
        if (!(n >> 12 & 15)) recv(fd, bytes, BYTES, MSG_PEEK | MSG_DONTWAIT);
        if (!(n >> 12 & 63)) readv(fd, parts, 2);
        recv(fd, bytes, n >> 20 & 1 ? BYTES : 1 + (n >> 21 & 511), MSG_DONTWAIT);
    }
    return unused;
}

static void use_inherited(int port, unsigned round) {
    for (int i = 0; i < CONNECTIONS; ++i) {
        inherited[i] = open_connection(port);
        if (!carries(inherited[i], round, 1)) exit(4);
        limit_calls(inherited[i], (struct timeval){.tv_usec = 50000});
    }
    pid_t child = start_child(1 << 16, 1, round * 7 + 1);
    over = 0;
    pthread_t threads[2];
    pthread_create(&threads[0], 0, send_all_the_time, 0);
    pthread_create(&threads[1], 0, receive_all_the_time, 0);
    usleep(MOMENT_MS * 1000);
    over = 1;
    for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
    if (round & 1)
        for (int i = 0; i < CONNECTIONS; ++i) close(inherited[i]);
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    if (~round & 1)
        for (int i = 0; i < CONNECTIONS; ++i) close(inherited[i]);
}

static unsigned long sent_by_tcp(int fd) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    return info.tcpi_bytes_sent;
}

static int wait_in_later_set(int port, int count) {
    int earlier = epoll_create1(EPOLL_CLOEXEC), first = open_connection(port);
    struct epoll_event wanted = {.events = EPOLLIN}, came;
    if (epoll_ctl(earlier, EPOLL_CTL_ADD, first, &wanted) || !carries(first, 5, ROUNDS)) return 4;
    pid_t child = start_child(1 << 20, 0, 1);
    int later = epoll_create1(EPOLL_CLOEXEC), fd = open_connection(port);
    if (epoll_ctl(later, EPOLL_CTL_ADD, fd, &wanted) || !carries(fd, 6, ROUNDS)) return 4;
    pid_t idle = fork();
    if (idle == 0) for (;;) pause();
    unsigned long before = sent_by_tcp(fd);
    int well = 0;
    for (int i = 0; i < count; ++i) {
        char byte = (char)i, back = 0;
        if (send(fd, &byte, 1, MSG_NOSIGNAL) == 1 && epoll_wait(later, &came, 1, 5000) == 1)
            well += recv(fd, &back, 1, 0) == 1 && back == byte;
    }
    printf("carried %d of %d by %s\n", well, count, sent_by_tcp(fd) == before ? "ring" : "tcp");
    for (int i = 0; i < 2; ++i) {
        kill(i ? idle : child, SIGKILL);
        waitpid(i ? idle : child, 0, 0);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int port = atoi(argv[2]), count = atoi(argv[3]), well = 0;
    // A call that never returns ends the program by a signal.
    alarm(300);
    if (!strcmp(argv[1], "inherited")) {
        for (int i = 0; i < count; ++i) use_inherited(port, (unsigned)i);
        int fd = open_connection(port);
        printf("survived %d of %d rounds, then carried %d\n", count, count, carries(fd, 3, ROUNDS));
        return 0;
    }
    if (!strcmp(argv[1], "set")) return wait_in_later_set(port, count);
    int first = open_connection(port);
    if (!carries(first, 7, ROUNDS)) return 4;
    pid_t child = start_child(1 << 20, 0, 1);
    for (int i = 0; i < count; ++i) {
        int fd = open_connection(port);
        well += carries(fd, (unsigned)i, ROUNDS);
        close(fd);
    }
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    printf("carried %d of %d\n", well, count);
    return 0;
}
