// A program whose signal handler sends by the connection that its thread is sending by.
//
//   handler sink PORT    takes one connection, counts what comes by it, and says so by it
//   handler send PORT    sends large buffers, each of which a handler interrupts to send a byte. Says how many bytes of either kind are missing, in
//                        how many calls of the handler another error came than EAGAIN, and how many bytes it sent
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { BYTES = 4 << 20, CALLS = 200 };

static int fd;
static volatile sig_atomic_t sent, refused, failed;

static void on_alarm(int number) {
    (void)number;
    int error = errno;
    ssize_t n = send(fd, "h", 1, MSG_NOSIGNAL);
    if (n == 1) ++sent;
    else if (errno == EAGAIN) ++refused;
    else ++failed;
    errno = error;
}

static void set_timer(int microseconds) {
    struct itimerval timer = {.it_value = {.tv_usec = microseconds}};
    setitimer(ITIMER_REAL, &timer, 0);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    static char buffer[BYTES];
    long counts[2] = {0, 0};
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!strcmp(argv[1], "sink")) {
        int listener = fd, one = 1;
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 8)) return 4;
        puts("ready");
        fflush(stdout);
        fd = accept(listener, 0, 0);
        for (ssize_t n; (n = recv(fd, buffer, BYTES, 0)) > 0;)
            for (ssize_t i = 0; i < n; ++i) ++counts[buffer[i] == 'h'];
        return send(fd, counts, sizeof counts, 0) != sizeof counts;
    }
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) return 3;
    memset(buffer, 'm', BYTES);
    long own = 0;
    // Until it goes by a ring.
    for (int i = 0; i < 100; ++i, usleep(1000)) own += send(fd, buffer, 1, 0);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    for (int calls = 0; sent + refused + failed < CALLS; ++calls) {
        set_timer(100 + calls % 50 * 20);
        ssize_t n = send(fd, buffer, BYTES, 0);
        if (n < 0) return 5;
        own += n;
    }
    set_timer(0);
    shutdown(fd, SHUT_WR);
    if (recv(fd, counts, sizeof counts, MSG_WAITALL) != sizeof counts) return 6;
    printf("missing %ld and %ld failed %d of %d, refused %d\n", own - counts[0], sent - counts[1], failed, sent, refused);
    return 0;
}
