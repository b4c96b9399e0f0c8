/* What the library promises, seen from C: `calls CASE` runs one case and ends with 0, or says which check has failed.
 * It is C11 and C++17. PARTYWALL_BROKER names a broker. */
#include <linux/membarrier.h>
#include <partywall.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void failed(int line, const char *what) {
    fprintf(stderr, "calls.c:%d: %s; last error: %s\n", line, what, pw_last_error());
    exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))

static const int GUARD = 60000; /* Only a guard against hanging. */

static pw_options fixed_ring(uint64_t size) {
    pw_options options = PW_OPTIONS_INIT;
    options.ring_initial = options.ring_max = size;
    return options;
}

static void pair(uint64_t size, pw_stream **a, pw_stream **b) {
    pw_options options = fixed_ring(size);
    CHECK(pw_pair(&options, a, b) == PW_OK);
}

static int is_readable(int fd, int timeout_ms) {
    struct pollfd one;
    one.fd = fd;
    one.events = POLLIN;
    one.revents = 0;
    CHECK(fd >= 0);
    return poll(&one, 1, timeout_ms) == 1;
}

/* A program that was compiled with an earlier header has a shorter structure, and one with a later header a longer one. */
static void peers_of_other_versions_of_the_header(pw_stream *stream) {
    struct {
        pw_peer known;
        uint64_t later;
    } peer = {PW_PEER_INIT, 7};
    peer.known.size = offsetof(pw_peer, certain_uid);
    peer.known.certain_uid = 7;
    CHECK(pw_stream_peer(stream, &peer.known) == PW_OK);
    CHECK(peer.known.pid == (int64_t)getpid() && peer.known.certain_uid == 7);
    peer.known.size = sizeof peer;
    CHECK(pw_stream_peer(stream, &peer.known) == PW_OK);
    CHECK(peer.known.size == sizeof peer && peer.known.certain_uid == (int64_t)getuid() && peer.later == 7);
}

static void streams(void) {
    pw_domain *web, *shop;
    pw_listener *listener;
    pw_stream *here, *there;
    pw_peer peer = PW_PEER_INIT;
    uint64_t number = 0, other = 1;
    char buffer[64];
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_join("shop", NULL, &shop) == PW_OK);
    CHECK(strcmp(pw_domain_name(web), "web") == 0);
    CHECK(pw_connect(shop, "web:echo", NULL, &here) == PW_NOT_FOUND);
    CHECK(strstr(pw_last_error(), "echo") != NULL);
    CHECK(pw_listen(web, "echo", NULL, &listener) == PW_OK);
    {
        pw_listener *second;
        CHECK(pw_listen(web, "echo", NULL, &second) == PW_IN_USE);
    }
    CHECK(pw_accept(listener, 0, &there) == PW_EMPTY);
    CHECK(pw_accept(listener, 1, &there) == PW_TIMED_OUT);
    CHECK(!is_readable(pw_listener_fd(listener), 0));
    CHECK(pw_connect(shop, "web:echo", NULL, &here) == PW_OK);
    CHECK(is_readable(pw_listener_fd(listener), GUARD));
    CHECK(pw_accept(listener, GUARD, &there) == PW_OK);
    CHECK(pw_stream_peer(there, &peer) == PW_OK);
    CHECK(strcmp(peer.domain, "shop") == 0 && strcmp(peer.service, "echo") == 0);
    CHECK(peer.uid == (int64_t)getuid() && peer.pid == (int64_t)getpid() && peer.certain_uid == peer.uid);
    CHECK(pw_stream_peer(here, &peer) == PW_OK);
    CHECK(strcmp(peer.domain, "web") == 0 && peer.uid == -1 && peer.pid == -1 && peer.certain_uid == -1);
    peers_of_other_versions_of_the_header(there);
    CHECK(pw_stream_channel(here, &number) == PW_OK && pw_stream_channel(there, &other) == PW_OK);
    CHECK(number == other && number != 0);
    CHECK(pw_write(here, "question", 8, GUARD) == 8);
    CHECK(pw_shutdown(here, PW_SHUT_WRITE) == PW_OK);
    CHECK(pw_write(here, "more", 4, GUARD) == PW_CLOSED);
    CHECK(pw_read(there, buffer, sizeof buffer, GUARD) == 8 && memcmp(buffer, "question", 8) == 0);
    CHECK(pw_read(there, buffer, sizeof buffer, GUARD) == 0);
    CHECK(pw_write(there, "answer", 6, GUARD) == 6);
    pw_close(there);
    CHECK(pw_read(here, buffer, sizeof buffer, GUARD) == 6);
    CHECK(pw_read(here, buffer, sizeof buffer, GUARD) == 0);
    pw_close(here);
    pw_leave(shop);
    pw_leave(web); /* The listener keeps the membership. */
    CHECK(pw_accept(listener, 0, &there) == PW_EMPTY);
    pw_listener_close(listener);
}

static void waits(void) {
    pw_stream *a, *b;
    char bytes[4096] = {0};
    pair(4096, &a, &b);
    CHECK(pw_read(b, bytes, 1, 0) == PW_EMPTY);
    CHECK(strcmp(pw_last_error(), pw_strerror(PW_EMPTY)) == 0);
    CHECK(pw_read(b, bytes, 1, 1) == PW_TIMED_OUT);
    CHECK(pw_read(b, bytes, 0, PW_FOREVER) == 0);
    /* A writer that found the ring full is woken through its own descriptor. */
    CHECK(pw_write(a, bytes, sizeof bytes, 0) == (ptrdiff_t)sizeof bytes);
    CHECK(pw_write(a, bytes, 1, 1) == PW_TIMED_OUT);
    CHECK(pw_write(a, bytes, 1, 0) == PW_FULL);
    CHECK(pw_read(b, bytes, sizeof bytes, 0) == (ptrdiff_t)sizeof bytes);
    CHECK(is_readable(pw_write_fd(a), GUARD));
    CHECK(pw_write(a, "x", 1, 0) == 1);
    /* And a reader that found it empty. */
    CHECK(pw_read(b, bytes, 4096, 0) == 1);
    CHECK(pw_read(b, bytes, 1, 0) == PW_EMPTY);
    CHECK(pw_write(a, "y", 1, 0) == 1);
    CHECK(is_readable(pw_read_fd(b), GUARD));
    CHECK(pw_read(b, bytes, 1, 0) == 1 && bytes[0] == 'y');
    CHECK(pw_shutdown(b, PW_SHUT_READ) == PW_OK);
    CHECK(pw_write(a, "z", 1, GUARD) == PW_CLOSED);
    pw_close(a);
    pw_close(b);
}

static void in_place(void) {
    pw_stream *a, *b;
    void *span;
    const void *shown;
    char copy[8];
    pair(4096, &a, &b);
    CHECK(pw_reserve(a, 1 << 20, 0, &span) == PW_TOO_LARGE);
    CHECK(pw_commit(a, 1) == PW_INVALID);
    CHECK(pw_reserve(a, 100, 0, &span) == PW_OK);
    memset(span, 'p', 100);
    CHECK(pw_write(a, "x", 1, 0) == PW_INVALID);
    CHECK(pw_commit(a, 101) == PW_INVALID);
    CHECK(pw_commit(a, 6) == PW_OK);
    CHECK(pw_commit(a, 1) == PW_INVALID);
    CHECK(pw_reserve(a, 10, 0, &span) == PW_OK);
    CHECK(pw_commit(a, 0) == PW_OK);
    CHECK(pw_write(a, "qq", 2, 0) == 2);
    CHECK(pw_release(b, 1) == PW_INVALID);
    CHECK(pw_peek(b, 8, GUARD, &shown) == 8);
    memcpy(copy, shown, sizeof copy);
    CHECK(memcmp(copy, "ppppppqq", 8) == 0);
    CHECK(pw_release(b, 9) == PW_INVALID);
    CHECK(pw_release(b, 6) == PW_OK && pw_release(b, 3) == PW_INVALID);
    CHECK(pw_read(b, copy, sizeof copy, 0) == 2);
    CHECK(pw_release(b, 1) == PW_INVALID);
    CHECK(pw_peek(b, 1, 0, &shown) == PW_EMPTY);
    /* A span that was never committed is given up with the stream. */
    CHECK(pw_reserve(a, 10, 0, &span) == PW_OK);
    CHECK(pw_shutdown(a, PW_SHUT_BOTH) == PW_OK);
    CHECK(pw_peek(b, 1, GUARD, &shown) == 0);
    CHECK(pw_reserve(a, 1, 0, &span) == PW_CLOSED);
    pw_close(a);
    pw_close(b);
    pair(4096, &b, &a);
    CHECK(pw_reserve(b, 10, 0, &span) == PW_OK);
    pw_close(b);
    pw_close(a);
}

/* How many regions this process has mapped, and how many of them say in their header that a sleeper interrupts other processors (protocol M5, W4). */
static void count_regions(int *all, int *asymmetric) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    *all = *asymmetric = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long start, offset;
        char access[8];
        if (strstr(line, "memfd:partywall") != NULL && sscanf(line, "%lx-%*x %7s %lx", &start, access, &offset) == 3) {
            if (access[0] == 'r' && offset == 0 && memcmp((const void *)start, "PARTYWAL", 8) == 0) {
                uint32_t flags;
                memcpy(&flags, (const char *)start + 32, sizeof flags);
                *all += 1;
                *asymmetric += flags & 1;
            }
        }
    }
    fclose(maps);
}

/* `sleeps_often` reaches the headers of the regions. */
static void sleeps_often(void) {
    pw_stream *a, *b;
    pw_options options = PW_OPTIONS_INIT;
    int all, asymmetric;
    /* A kernel or a sandbox without this call has fences everywhere. */
    int has_membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
    CHECK(pw_pair(&options, &a, &b) == PW_OK);
    count_regions(&all, &asymmetric);
    CHECK(all >= 2 && asymmetric == (has_membarrier ? all : 0));
    pw_close(a);
    pw_close(b);
    options.sleeps_often = 1;
    CHECK(pw_pair(&options, &a, &b) == PW_OK);
    count_regions(&all, &asymmetric);
    CHECK(all >= 2 && asymmetric == 0);
    pw_close(a);
    pw_close(b);
}

static void misuse(void) {
    pw_stream *a, *b, *none = NULL;
    pw_domain *domain = NULL;
    pw_listener *listener = NULL;
    pw_options options = PW_OPTIONS_INIT;
    pw_peer peer = PW_PEER_INIT;
    char byte;
    struct {
        pw_options known;
        uint64_t later;
    } longer;
    CHECK(pw_join("no name at all", NULL, &domain) < 0 && domain == NULL);
    CHECK(pw_join("web", "/nonexistent/broker", &domain) == PW_NO_BROKER);
    CHECK(strstr(pw_last_error(), "partywalld") != NULL);
    CHECK(pw_join("\xff\xfe", NULL, &domain) == PW_INVALID);
    CHECK(pw_join("web", NULL, NULL) == PW_INVALID);
    CHECK(pw_listen(NULL, "echo", NULL, &listener) == PW_INVALID);
    CHECK(pw_join("web", NULL, &domain) == PW_OK);
    CHECK(pw_listen(domain, NULL, NULL, &listener) == PW_INVALID);
    CHECK(pw_connect(domain, "web", NULL, &none) == PW_INVALID);
    CHECK(strstr(pw_last_error(), "DOMAIN:SERVICE") != NULL);
    pw_leave(domain);
    CHECK(pw_read(NULL, &byte, 1, 0) == PW_INVALID && pw_write(NULL, &byte, 1, 0) == PW_INVALID);
    CHECK(pw_read_fd(NULL) == PW_INVALID && pw_commit(NULL, 0) == PW_INVALID && pw_release(NULL, 0) == PW_INVALID);
    CHECK(pw_domain_name(NULL) == NULL);
    CHECK(pw_longest_message(NULL) == 0);
    CHECK(pw_pair(NULL, &a, NULL) == PW_INVALID && pw_pair(NULL, NULL, &b) == PW_INVALID);
    options.size = 8;
    CHECK(pw_pair(&options, &a, &b) == PW_INVALID);
    options = fixed_ring((uint64_t)1 << 40);
    CHECK(pw_pair(&options, &a, &b) == PW_INVALID);
    /* A newer program's options: fine while it asks for nothing that this library lacks. */
    longer.known = fixed_ring(4096);
    longer.known.size = sizeof longer;
    longer.later = 0;
    CHECK(pw_pair(&longer.known, &a, &b) == PW_OK);
    longer.later = 1;
    CHECK(pw_pair(&longer.known, &none, &none) == PW_INVALID && none == NULL);
    CHECK(pw_read(a, NULL, 1, 0) == PW_INVALID && pw_write(a, NULL, 1, 0) == PW_INVALID);
    CHECK(pw_read(a, &byte, (size_t)-1, 0) == PW_INVALID);
    CHECK(pw_reserve(a, 1, 0, NULL) == PW_INVALID && pw_peek(a, 1, 0, NULL) == PW_INVALID);
    CHECK(pw_shutdown(a, 0) == PW_INVALID && pw_shutdown(a, 4) == PW_INVALID);
    peer.size = 4;
    CHECK(pw_stream_peer(a, &peer) == PW_INVALID && pw_stream_peer(a, NULL) == PW_INVALID);
    pw_close(a);
    pw_close(b);
    pw_close(NULL);
    pw_listener_close(NULL);
    pw_message_close(NULL);
    pw_message_listener_close(NULL);
    pw_leave(NULL);
    CHECK(strcmp(pw_strerror(PW_OK), "success") == 0 && strstr(pw_strerror(-1000), "unknown") != NULL);
    CHECK(strlen(pw_version()) >= 5);
}

static void messages(void) {
    pw_domain *web;
    pw_message_listener *listener;
    pw_message_socket *here, *there;
    pw_options options = fixed_ring(4096);
    pw_peer peer = PW_PEER_INIT;
    char buffer[4096] = {0};
    size_t length = 0;
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_message_listen(web, "orders", &options, &listener) == PW_OK);
    CHECK(pw_message_accept(listener, 0, &there) == PW_EMPTY);
    CHECK(pw_message_accept(listener, 1, &there) == PW_TIMED_OUT);
    CHECK(pw_message_connect(web, "web:orders", &options, &here) == PW_OK);
    CHECK(is_readable(pw_message_listener_fd(listener), GUARD));
    CHECK(pw_message_accept(listener, GUARD, &there) == PW_OK);
    CHECK(pw_message_peer(there, &peer) == PW_OK && strcmp(peer.service, "orders") == 0);
    CHECK(pw_message_peer(here, &peer) == PW_INVALID);
    CHECK(pw_receive(there, buffer, sizeof buffer, &length, 0) == PW_EMPTY);
    CHECK(pw_send(here, "two apples", 10, 0) == PW_OK);
    CHECK(is_readable(pw_receive_fd(there), GUARD));
    CHECK(pw_receive(there, buffer, 4, &length, GUARD) == PW_TOO_LARGE && length == 10);
    CHECK(pw_receive(there, buffer, sizeof buffer, &length, GUARD) == PW_OK && length == 10);
    CHECK(memcmp(buffer, "two apples", 10) == 0);
    CHECK(pw_send(here, NULL, 0, 0) == PW_OK);
    CHECK(pw_receive(there, buffer, sizeof buffer, &length, GUARD) == PW_OK && length == 0);
    CHECK(pw_longest_message(here) < 4096);
    CHECK(pw_send(here, buffer, pw_longest_message(here) + 1, 0) == PW_TOO_LARGE);
    CHECK(pw_send(here, buffer, pw_longest_message(here), 0) == PW_OK);
    CHECK(pw_send(here, buffer, 64, 1) == PW_TIMED_OUT);
    CHECK(pw_send(here, buffer, 64, 0) == PW_FULL);
    CHECK(pw_receive(there, buffer, sizeof buffer, &length, GUARD) == PW_OK);
    CHECK(is_readable(pw_send_fd(here), GUARD));
    CHECK(pw_finish(here) == PW_OK);
    CHECK(pw_receive(there, buffer, sizeof buffer, &length, GUARD) == PW_CLOSED);
    pw_message_close(here);
    pw_message_close(there);
    pw_message_listener_close(listener);
    pw_leave(web);
}

static void *write_much(void *stream) {
    static char bytes[100000];
    int i;
    for (i = 0; i < 50; i++) {
        if (pw_write((pw_stream *)stream, bytes, sizeof bytes, GUARD) != (ptrdiff_t)sizeof bytes) {
            return stream;
        }
    }
    return pw_shutdown((pw_stream *)stream, PW_SHUT_WRITE) == PW_OK ? NULL : stream;
}

static size_t read_all(pw_stream *stream) {
    static char bytes[65536];
    size_t all = 0;
    ptrdiff_t n;
    while ((n = pw_read(stream, bytes, sizeof bytes, GUARD)) > 0) {
        all += (size_t)n;
    }
    CHECK(n == 0);
    return all;
}

static void *echo(void *stream) {
    static char bytes[65536];
    ptrdiff_t n;
    while ((n = pw_read((pw_stream *)stream, bytes, sizeof bytes, GUARD)) > 0) {
        if (pw_write((pw_stream *)stream, bytes, (size_t)n, GUARD) != n) {
            return stream;
        }
    }
    return n == 0 && pw_shutdown((pw_stream *)stream, PW_SHUT_WRITE) == PW_OK ? NULL : stream;
}

/* One thread writes to a stream while another one reads from it. */
static void threads(void) {
    pw_stream *a, *b;
    pthread_t writer, echoer;
    void *failure;
    pair(1 << 16, &a, &b);
    CHECK(pthread_create(&writer, NULL, write_much, a) == 0);
    CHECK(pthread_create(&echoer, NULL, echo, b) == 0);
    CHECK(read_all(a) == 5000000);
    CHECK(pthread_join(writer, &failure) == 0 && failure == NULL);
    CHECK(pthread_join(echoer, &failure) == 0 && failure == NULL);
    pw_close(a);
    pw_close(b);
}

static void *send_many(void *socket) {
    uint32_t i;
    for (i = 0; i < 2000; i++) {
        if (pw_send((pw_message_socket *)socket, &i, sizeof i, GUARD) != PW_OK) {
            return socket;
        }
    }
    return pw_finish((pw_message_socket *)socket) == PW_OK ? NULL : socket;
}

/* And one thread sends messages while another one receives some. */
static void message_threads(void) {
    pw_domain *web;
    pw_message_listener *listener;
    pw_message_socket *ends[2];
    pw_options options = fixed_ring(4096);
    pthread_t senders[2];
    void *failure;
    uint32_t got, i;
    size_t length;
    int end, rc;
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_message_listen(web, "orders", &options, &listener) == PW_OK);
    CHECK(pw_message_connect(web, "web:orders", &options, &ends[0]) == PW_OK);
    CHECK(pw_message_accept(listener, GUARD, &ends[1]) == PW_OK);
    for (end = 0; end < 2; end++) {
        CHECK(pthread_create(&senders[end], NULL, send_many, ends[end]) == 0);
    }
    for (i = 0; i < 2000; i++) {
        for (end = 0; end < 2; end++) {
            CHECK(pw_receive(ends[end], &got, sizeof got, &length, GUARD) == PW_OK && length == sizeof got && got == i);
        }
    }
    for (end = 0; end < 2; end++) {
        rc = pw_receive(ends[end], &got, sizeof got, &length, GUARD);
        CHECK(rc == PW_CLOSED);
        CHECK(pthread_join(senders[end], &failure) == 0 && failure == NULL);
        pw_message_close(ends[end]);
    }
    pw_message_listener_close(listener);
    pw_leave(web);
}

/* A child of a fork cannot use its parent's handles, and cannot harm them by closing them. */
static void forks(void) {
    pw_stream *a, *b, *c, *d;
    pw_domain *domain;
    int status;
    char byte;
    pid_t child;
    pair(4096, &a, &b);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (pw_write(a, "x", 1, 0) != PW_FORKED || strstr(pw_last_error(), "fork") == NULL) {
            _exit(1);
        }
        if (pw_pair(NULL, &c, &d) != PW_FORKED || pw_join("web", NULL, &domain) != PW_FORKED) {
            _exit(2);
        }
        pw_close(a);
        pw_close(b);
        /* What a child is to do. Under valgrind, an end without it would count the memory of threads that the child does not have as lost. */
        execl("/bin/true", "true", (char *)NULL);
        _exit(3);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(pw_write(a, "x", 1, 0) == 1 && pw_read(b, &byte, 1, GUARD) == 1 && byte == 'x');
    pw_close(a);
    pw_close(b);
}

/* Workers that are forked before the library is used are like any other process. */
static void workers(void) {
    pid_t child = fork();
    int status;
    CHECK(child >= 0);
    if (child == 0) {
        waits();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    waits();
}

/* Offers a service, accepts one visitor, and waits to be killed. */
static void victim(void) {
    pw_domain *web;
    pw_listener *listener;
    pw_stream *stream;
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_listen(web, "grave", NULL, &listener) == PW_OK);
    printf("ready\n");
    fflush(stdout);
    CHECK(pw_accept(listener, GUARD, &stream) == PW_OK);
    CHECK(pw_write(stream, "last", 4, GUARD) == 4);
    printf("serving\n");
    fflush(stdout);
    for (;;) {
        pause();
    }
}

/* Connects to the victim, reads its last words, and then gets PW_DEAD in both directions. */
static void survivor(void) {
    pw_domain *shop;
    pw_stream *stream;
    char bytes[16];
    ptrdiff_t n;
    CHECK(pw_join("shop", NULL, &shop) == PW_OK);
    CHECK(pw_connect(shop, "web:grave", NULL, &stream) == PW_OK);
    CHECK(pw_read(stream, bytes, sizeof bytes, GUARD) == 4);
    printf("connected\n");
    fflush(stdout);
    CHECK(pw_read(stream, bytes, sizeof bytes, GUARD) == PW_DEAD);
    CHECK(strstr(pw_last_error(), "connect again") != NULL);
    while ((n = pw_write(stream, "x", 1, GUARD)) == 1) {
    }
    CHECK(n == PW_DEAD);
    CHECK(pw_read(stream, bytes, sizeof bytes, GUARD) == PW_DEAD);
    pw_close(stream);
    pw_leave(shop);
}

/* A peer that breaks the protocol: it overwrites the first page of all memory that it shares. The kernel lets it, as the memory is its own. */
static void liar(void) {
    pw_domain *web;
    pw_listener *listener;
    pw_stream *stream;
    char line[512];
    FILE *maps;
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_listen(web, "lies", NULL, &listener) == PW_OK);
    printf("ready\n");
    fflush(stdout);
    CHECK(pw_accept(listener, GUARD, &stream) == PW_OK);
    CHECK(pw_write(stream, "true", 4, GUARD) == 4);
    CHECK(pw_read(stream, line, 1, GUARD) == 1);
    maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long start;
        if (strstr(line, " rw-s ") != NULL && strstr(line, "memfd:") != NULL && sscanf(line, "%lx", &start) == 1) {
            memset((void *)start, 0xff, 4096);
        }
    }
    fclose(maps);
    for (;;) {
        pause();
    }
}

/* Connects to the liar, and gets PW_CORRUPT. */
static void deceived(void) {
    pw_domain *shop;
    pw_stream *stream, *other, *end;
    char bytes[16];
    ptrdiff_t n;
    CHECK(pw_join("shop", NULL, &shop) == PW_OK);
    CHECK(pw_connect(shop, "web:lies", NULL, &stream) == PW_OK);
    CHECK(pw_read(stream, bytes, sizeof bytes, GUARD) == 4);
    CHECK(pw_write(stream, "x", 1, GUARD) == 1);
    /* The liar need not ring, so the reader looks now and then. */
    while ((n = pw_read(stream, bytes, sizeof bytes, 10)) == PW_TIMED_OUT) {
    }
    CHECK(n == PW_CORRUPT);
    CHECK(pw_read(stream, bytes, sizeof bytes, GUARD) == PW_CORRUPT);
    while ((n = pw_write(stream, bytes, sizeof bytes, 10)) > 0) {
    }
    CHECK(n == PW_CORRUPT || n == PW_CLOSED || n == PW_DEAD || n == PW_ACCUSED);
    pw_close(stream);
    /* Other connections go on. */
    pair(4096, &other, &end);
    CHECK(pw_write(other, "x", 1, 0) == 1 && pw_read(end, bytes, 1, GUARD) == 1);
    pw_close(other);
    pw_close(end);
    pw_leave(shop);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"streams", streams}, {"waits", waits},     {"in_place", in_place}, {"misuse", misuse}, {"messages", messages},
        {"threads", threads}, {"forks", forks},     {"workers", workers},   {"victim", victim}, {"survivor", survivor},
        {"liar", liar},       {"deceived", deceived}, {"message_threads", message_threads}, {"sleeps_often", sleeps_often},
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (argc == 2 && strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "usage: calls CASE\n");
    return 2;
}
