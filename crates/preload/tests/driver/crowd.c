/* Many threads that connect at once, each again and again, and use each connection from two threads.
 *
 *   crowd serve PORT
 *   crowd go PORT THREADS ROUNDS CALLS
 *
 * Ends with 0, or with 1 and words on standard error.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SIZE = 100, MOST = 64 };

static int port, rounds, calls;
static pthread_barrier_t together;

static void fail(const char *what) {
    perror(what);
    _exit(1);
}

static struct sockaddr_in address(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

static void *echo(void *argument) {
    int fd = (int)(long)argument;
    char buffer[4096];
    ssize_t n;
    while ((n = recv(fd, buffer, sizeof buffer, 0)) > 0)
        if (send(fd, buffer, (size_t)n, MSG_NOSIGNAL) != n) break;
    close(fd);
    return NULL;
}

static void serve(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in at = address();
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) fail("listen");
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t thread;
        if (fd >= 0 && !pthread_create(&thread, NULL, echo, (void *)(long)fd)) pthread_detach(thread);
    }
}

static void *hear(void *argument) {
    int fd = (int)(long)argument;
    char buffer[SIZE];
    for (long got = 0; got < (long)calls * SIZE;) {
        ssize_t n = recv(fd, buffer, sizeof buffer, 0);
        if (n <= 0) fail("recv");
        for (ssize_t i = 0; i < n; i++)
            if (buffer[i] != (char)((got + i) / SIZE)) fail("a wrong byte");
        got += n;
    }
    return NULL;
}

static void *talk(void *unused) {
    (void)unused;
    for (int round = 0; round < rounds; round++) {
        pthread_barrier_wait(&together);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in at = address();
        if (connect(fd, (struct sockaddr *)&at, sizeof at)) fail("connect");
        pthread_t hearer;
        if (pthread_create(&hearer, NULL, hear, (void *)(long)fd)) fail("thread");
        for (int call = 0; call < calls; call++) {
            char buffer[SIZE];
            memset(buffer, call, sizeof buffer);
            if (send(fd, buffer, SIZE, 0) != SIZE) fail("send");
        }
        pthread_join(hearer, NULL);
        close(fd);
    }
    return NULL;
}

int main(int count, char **words) {
    if (count < 3) return 1;
    port = atoi(words[2]);
    if (!strcmp(words[1], "serve")) serve();
    if (count != 6) return 1;
    int threads = atoi(words[3]);
    rounds = atoi(words[4]);
    calls = atoi(words[5]);
    if (threads > MOST) return 1;
    pthread_barrier_init(&together, NULL, (unsigned)threads);
    pthread_t all[MOST];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&all[i], NULL, talk, NULL)) fail("thread");
    for (int i = 0; i < threads; i++) pthread_join(all[i], NULL);
    return 0;
}
