/*
 * Preloaded into a broker, or the agent of a machine: kills it while one of its processes has a connection in TCP's repair mode (protocol T3.5).
 *
 * DIE_READING names a file with a number N, a number of a queue and a word. When a process with this library has chosen that queue for the N-th
 * time, or has entered repair mode for the N-th time if the queue is 0, it removes the file. If the word is "all", it kills its
 * process group. If the word is "self", it kills itself: the agent reads in its own process. If the word is "broker", it kills the
 * broker alone, and goes on after 100 ms.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The broker is the parent of the process that forked this one. */
static pid_t broker(void) {
    char path[64];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", getppid());
    FILE *stat = fopen(path, "r");
    if (!stat || fscanf(stat, "%*d (%*[^)]) %*c %d", &parent) != 1) abort();
    fclose(stat);
    return parent;
}

static void die(int queue) {
    static int times[3];
    const char *path = getenv("DIE_READING");
    int at, wanted;
    char who[16];
    FILE *order = path ? fopen(path, "r") : NULL;
    if (!order) return;
    int found = fscanf(order, "%d %d %15s", &at, &wanted, who);
    fclose(order);
    if (found != 3 || wanted != queue || ++times[queue] != at) return;
    unlink(path);
    if (!strcmp(who, "all")) kill(0, SIGKILL);
    if (!strcmp(who, "self")) kill(getpid(), SIGKILL);
    kill(broker(), SIGKILL);
    /* Time for any process that would kill this one in turn. */
    usleep(100000);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    static int (*next)(int, int, int, const void *, socklen_t);
    if (!next) next = (int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
    int result = next(fd, level, name, value, len);
    if (result == 0 && level == IPPROTO_TCP) {
        int given = *(const int *)value;
        if (name == TCP_REPAIR && given == TCP_REPAIR_ON) die(0);
        if (name == TCP_REPAIR_QUEUE && given > 0 && given < 3) die(given);
    }
    return result;
}
