// A program whose child gives up its rights and then writes over all memory that it shares with its parent.
//
//   scribble PORT COUNT   connects to an echo server; forks a child that scribbles as another user; makes COUNT further connections, and
//                         says over how many of them all bytes came back as they were sent
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 40000, ROUNDS = 20 };

static int open_connection(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval limit = {.tv_sec = 20};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) exit(3);
    return fd;
}

// Whether what is sent comes back.
static int carries(int fd, unsigned seed) {
    static unsigned char sent[BYTES], came[BYTES];
    for (int round = 0; round < ROUNDS; ++round) {
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

struct area { unsigned char *from; size_t len; } areas[64];

// Memory that is shared by fork: /proc/self/maps calls it "/dev/zero (deleted)".
static int find_areas(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int count = 0;
    while (maps && fgets(line, sizeof line, maps) && count < 64) {
        unsigned long from, to;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3) continue;
        if (!strcmp(rights, "rw-s") && strstr(line, "/dev/zero"))
            areas[count++] = (struct area){(unsigned char *)from, to - from};
    }
    if (maps) fclose(maps);
    return count;
}

static void scribble(void) {
    // Mapped already in the parent: what it shares with us now is what it had then.
    int count = find_areas();
    if (setgid(65534) || setuid(65534)) _exit(5);
    unsigned seed = 1;
    for (;;)
        for (int i = 0; i < count; ++i)
            // Blocks in use are near the beginning.
            for (size_t at = 0; at + 8 <= areas[i].len && at < 1 << 20; at += 8) {
                seed = seed * 1103515245 + 12345;
                if (seed >> 30 == 0) *(uint64_t *)(areas[i].from + at) = (uint64_t)(seed >> 8) * (seed & 64 ? 1 : 0x100000001);
            }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int port = atoi(argv[1]), count = atoi(argv[2]), well = 0;
    int first = open_connection(port);
    if (!carries(first, 7)) return 4;
    pid_t child = fork();
    if (child == 0) scribble();
    usleep(100000);
    for (int i = 0; i < count; ++i) {
        int fd = open_connection(port);
        well += carries(fd, (unsigned)i);
        close(fd);
    }
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    printf("carried %d of %d\n", well, count);
    return 0;
}
