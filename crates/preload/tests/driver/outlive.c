// A UDP socket whose program goes on using its ring after the kernel's socket is closed, past the library that it is loaded with.
//
//   outlive hold PORT    receives numbered datagrams; at a line on standard input closes the socket by a bare system call and says so;
//                        at the next line says how many datagrams it got after that, and the last number
//   outlive send PORT    sends numbered datagrams, one every millisecond, until it is killed
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static long bare_close(int fd) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"((long)SYS_close), "D"((long)fd) : "rcx", "r11", "memory");
    return result;
}

static int line_came(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    char bytes[64];
    return poll(&input, 1, 0) > 0 && read(0, bytes, sizeof bytes) >= 0;
}

static uint64_t receive(int fd, uint64_t *count) {
    uint64_t number, last = 0;
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    while (recvfrom(fd, &number, sizeof number, MSG_DONTWAIT, (struct sockaddr *)&from, &len) == sizeof number) {
        last = number;
        ++*count;
    }
    return last;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (!strcmp(argv[1], "send")) {
        for (uint64_t number = 1;; ++number) {
            sendto(fd, &number, sizeof number, 0, (struct sockaddr *)&at, sizeof at);
            usleep(1000);
        }
    }
    if (bind(fd, (struct sockaddr *)&at, sizeof at)) return 3;
    puts("ready");
    fflush(stdout);
    uint64_t count = 0;
    while (!line_came()) receive(fd, &count);
    if (bare_close(fd)) return 4;
    puts("closed");
    fflush(stdout);
    while (!line_came()) usleep(1000);
    count = 0;
    uint64_t last = receive(fd, &count);
    printf("stole %lu until %lu\n", (unsigned long)count, (unsigned long)last);
    return 0;
}
