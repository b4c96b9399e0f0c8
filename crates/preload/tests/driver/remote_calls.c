/*
 * remote_calls PORT FLOW COUNT SIZE
 *
 * Connects to a server of the host itself, and makes COUNT steps in the function `measured`, whose instructions a tool can count. A step of FLOW
 *
 *   stream   sends SIZE bytes
 *   rounds   sends SIZE bytes and receives as many
 *   polled   does the same, and waits by poll(2) before it receives
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Steps before those that are counted: the library has looked for the peer by then. */
enum { BEFORE = 3000 };

static char bytes[1 << 16];

static void steps(int s, const char *flow, int count, size_t size)
{
    bool answered = strcmp(flow, "stream") != 0, polled = strcmp(flow, "polled") == 0;

    for (int i = 0; i < count; i++) {
        struct pollfd one = { .fd = s, .events = POLLIN };

        if (send(s, bytes, size, 0) != (ssize_t)size)
            exit(3);
        if (polled && poll(&one, 1, -1) != 1)
            exit(4);
        if (answered && recv(s, bytes, size, MSG_WAITALL) != (ssize_t)size)
            exit(5);
    }
}

__attribute__((noinline, noclone)) void measured(int s, const char *flow, int count, size_t size)
{
    steps(s, flow, count, size);
    /* The call above is not the last thing done, so this function is not replaced by it. */
    __asm__ volatile("" ::: "memory");
}

int main(int argc, char **argv)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int s = socket(AF_INET, SOCK_STREAM, 0);

    if (argc != 5)
        return 1;
    to.sin_port = htons((unsigned short)atoi(argv[1]));
    if (connect(s, (struct sockaddr *)&to, sizeof to) != 0)
        return 2;
    steps(s, argv[2], BEFORE, (size_t)atoi(argv[4]));
    usleep(300000);
    steps(s, argv[2], BEFORE, (size_t)atoi(argv[4]));
    measured(s, argv[2], atoi(argv[3]), (size_t)atoi(argv[4]));
    return 0;
}
