// Asks an echo server, and waits for each answer in a ring of io_uring before it reads it by recv(2).
//
// Usage: uring ADDRESS PORT QUESTIONS RING WAIT
//   RING   "first": the ring is made before the connection; a number: it is made after that many questions, waited for by poll(2)
//   WAIT   "poll": IORING_OP_POLL_ADD on the connection; "epoll": a set, filled by IORING_OP_EPOLL_CTL; "set": IORING_OP_POLL_ADD on the set
//
// With LIBURING the library makes the ring, and system calls of its own; otherwise they are made by syscall(2).
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef LIBURING
#include <liburing.h>
#else
#include <linux/io_uring.h>
#endif

static void die(const char *what) {
    perror(what);
    exit(errno == ENOSYS || errno == EPERM ? 77 : 1);
}

#ifdef LIBURING
static struct io_uring ring;

static void begin(void) {
    int result = io_uring_queue_init(8, &ring, 0);
    if (result < 0) {
        errno = -result;
        die("io_uring_queue_init");
    }
}

static struct io_uring_sqe *entry(void) { return memset(io_uring_get_sqe(&ring), 0, sizeof(struct io_uring_sqe)); }

static int done(void) {
    struct io_uring_cqe *cqe;
    int result = io_uring_submit_and_wait(&ring, 1);
    if (result < 0 || (result = io_uring_wait_cqe(&ring, &cqe)) < 0) {
        errno = -result;
        die("io_uring_submit_and_wait");
    }
    result = cqe->res;
    io_uring_cqe_seen(&ring, cqe);
    return result;
}
#else
static int ring;
static struct io_uring_params params;
static char *queue;
static struct io_uring_sqe *entries;

static unsigned *word(unsigned at) { return (unsigned *)(queue + at); }

static void begin(void) {
    ring = syscall(__NR_io_uring_setup, 8, &params);
    if (ring < 0)
        die("io_uring_setup");
    size_t one = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t other = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    queue = mmap(0, one > other ? one : other, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    entries = mmap(0, params.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    if (queue == MAP_FAILED || (void *)entries == MAP_FAILED)
        die("mmap");
}

static struct io_uring_sqe *entry(void) {
    unsigned index = *word(params.sq_off.tail) & *word(params.sq_off.ring_mask);
    word(params.sq_off.array)[index] = index;
    memset(&entries[index], 0, sizeof *entries);
    return &entries[index];
}

static int done(void) {
    __atomic_store_n(word(params.sq_off.tail), *word(params.sq_off.tail) + 1, __ATOMIC_RELEASE);
    while (syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
        if (errno != EINTR)
            die("io_uring_enter");
    unsigned head = *word(params.cq_off.head);
    if (head == __atomic_load_n(word(params.cq_off.tail), __ATOMIC_ACQUIRE))
        die("no completion");
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(queue + params.cq_off.cqes);
    int result = cqes[head & *word(params.cq_off.ring_mask)].res;
    __atomic_store_n(word(params.cq_off.head), head + 1, __ATOMIC_RELEASE);
    return result;
}
#endif

static int control(int set, int operation, int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u64 = 4711};
    struct io_uring_sqe *sqe = entry();
    sqe->opcode = IORING_OP_EPOLL_CTL;
    sqe->fd = set;
    sqe->addr = (uintptr_t)&event;
    sqe->len = operation;
    sqe->off = fd;
    return done();
}

static void poll_by_ring(int fd) {
    struct io_uring_sqe *sqe = entry();
    sqe->opcode = IORING_OP_POLL_ADD;
    sqe->fd = fd;
    sqe->poll32_events = POLLIN;
    if (!(done() & POLLIN))
        die("POLL_ADD");
}

static void expect(int got, int wanted, const char *what) {
    if (got != wanted) {
        fprintf(stderr, "%s: %d instead of %d\n", what, got, wanted);
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    int questions = atoi(argv[3]);
    int late = strcmp(argv[4], "first") ? atoi(argv[4]) : -1;
    const char *wait = argv[5];
    if (late < 0)
        begin();
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect");
    uint64_t sum = 0;
    for (int i = 0; i < questions; i++) {
        unsigned char question[128], answer[128];
        for (unsigned k = 0; k < sizeof question; k++)
            question[k] = (i * 31 + k * 7) >> 1;
        if (i == late)
            begin();
        if (i == (late < 0 ? 0 : late) && strcmp(wait, "poll")) {
            expect(control(set, EPOLL_CTL_MOD, fd, EPOLLIN), -ENOENT, "a change of what is not there");
            expect(control(set, EPOLL_CTL_ADD, fd, EPOLLIN), 0, "an addition");
            expect(control(set, EPOLL_CTL_ADD, fd, EPOLLIN), -EEXIST, "another one");
            expect(control(set, EPOLL_CTL_DEL, fd, 0), 0, "a removal");
            expect(control(set, EPOLL_CTL_DEL, fd, 0), -ENOENT, "another one");
            expect(control(set, EPOLL_CTL_ADD, fd, EPOLLOUT), 0, "an addition");
            expect(control(set, EPOLL_CTL_MOD, fd, EPOLLIN), 0, "a change");
        }
        if (send(fd, question, sizeof question, 0) != sizeof question)
            die("send");
        for (unsigned got = 0; got < sizeof answer;) {
            if (i < late) {
                struct pollfd one = {.fd = fd, .events = POLLIN};
                if (poll(&one, 1, -1) != 1)
                    die("poll");
            } else if (!strcmp(wait, "poll")) {
                poll_by_ring(fd);
            } else {
                struct epoll_event event = {0};
                if (!strcmp(wait, "set"))
                    poll_by_ring(set);
                // A set that was polled by a ring may have nothing in it.
                int n = epoll_wait(set, &event, 1, strcmp(wait, "set") ? -1 : 0);
                if (n < 0)
                    die("epoll_wait");
                if (n == 0)
                    continue;
                expect(event.data.u64, 4711, "the program's number");
            }
            ssize_t n = recv(fd, answer + got, sizeof answer - got, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN)
                continue;
            if (n <= 0)
                die("recv");
            got += n;
        }
        if (memcmp(question, answer, sizeof question))
            die("a wrong answer");
        for (unsigned k = 0; k < sizeof answer; k++)
            sum = sum * 31 + answer[k];
    }
    printf("%d answers, %llx\n", questions, (unsigned long long)sum);
    return 0;
}
