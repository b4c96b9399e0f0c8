/*
 * driver SEED STEPS [SKIP]
 *
 * Runs STEPS steps of the sequence SEED and prints a line for each. SKIP lists steps to leave out, as in 3-17,40. Standard input, if it
 * is a socket, is asked to turn connections up or down where the sequence says so, and by nobody else.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct hands hands[2];
struct model model;
bool two_processes;
volatile int pipe_signals, user_signals;
int me;

static int other = -1;          /* the socket to the other process */
static uint64_t seed;
static int steps, now;
static unsigned patience = 8;   /* seconds; a step that takes longer hangs */
static enum kind kind_now;
static const char *skipped = "";
static char **arguments;
static bool stands_in;          /* for its parent, for a while */

void tell(uint64_t number) {
    if (write(other, &number, sizeof number) != sizeof number) _exit(4);
}

uint64_t hear(void) {
    uint64_t number;
    ssize_t r;
    do r = read(other, &number, sizeof number);
    while (r < 0 && errno == EINTR);
    if (r != sizeof number) _exit(4);
    return number;
}

static void say(int at, int side, enum kind kind, const char *format, va_list list) {
    char line[1200];
    int n = snprintf(line, sizeof line, "%d %c %s ", at, "AB"[side], name_of(kind));
    n += vsnprintf(line + n, sizeof line - (size_t)n - 1, format, list);
    line[n++] = '\n';
    if (write(1, line, (size_t)n) != n) _exit(5);
}

void note_as(const struct step *s, int side, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(s->at, side, s->kind, format, list);
    va_end(list);
}

void note(const struct step *s, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(s->at, s->side, s->kind, format, list);
    va_end(list);
}

static void on_pipe(int signal) { (void)signal; pipe_signals++; }
static void on_user(int signal) { (void)signal; user_signals++; }
static void on_alarm(int signal) {
    (void)signal;
    char line[60];
    int n = snprintf(line, sizeof line, "%d %c HANGS in %s\n", now, two_processes ? "AB"[me] : '-', name_of(kind_now));
    if (write(1, line, (size_t)n) < 0) _exit(5);
    _exit(3);
}

static void catch_signals(void) {
    sigaction(SIGPIPE, &(struct sigaction){.sa_handler = on_pipe}, NULL);
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_user}, NULL);
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_alarm}, NULL);
}

static bool skip(int at) {
    for (const char *p = skipped; *p;) {
        char *end;
        long from = strtol(p, &end, 10), to = from;
        if (end == p) return false;
        if (*end == '-') to = strtol(end + 1, &end, 10);
        if (at >= from && at <= to) return true;
        p = *end ? end + 1 : end;
    }
    return false;
}

static void fresh_sets(int side) {
    for (int i = 0; i < 2; i++) {
        if (hands[side].set[i] >= 0) close(hands[side].set[i]);
        hands[side].set[i] = epoll_create1(EPOLL_CLOEXEC);
    }
}

/* Starts a child that stands in for this process until its time is over. Returns the step to go on with. */
static int stand_in(const struct step *s, const struct model *next) {
    int until = next->e[me].fork_ends;
    note(s, "until %d", until);
    pid_t child = fork();
    if (child < 0) _exit(6);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fresh_sets(me);
        stands_in = true;
        model = *next;
        tell(0);
        return s->at + 1;
    }
    alarm(0);
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (!WIFEXITED(status)) _exit(7);
    if (WEXITSTATUS(status)) _exit(WEXITSTATUS(status));
    if (until >= steps) exit(0);
    model = *next;
    for (int at = s->at + 1; at < until; at++) plan(&model, seed, at, skip(at));
    return until;
}

/* Hears of the program that the other side becomes, and is there for its connections meanwhile: what this side sent while they go, and
 * the other reads before this side calls again, is late (README). */
static void attend(void) {
    struct pollfd told = {.fd = other, .events = POLLIN};
    while (poll(&told, 1, 1) <= 0)
        for (int i = 0; i < SLOTS; i++)
            if (hands[me].fd[i] >= 0) poll(&(struct pollfd){.fd = hands[me].fd[i]}, 1, 0);
    hear();
}

static void become_new(const struct step *s) {
    char at[20], state[120];
    snprintf(at, sizeof at, "%d", s->at + 1);
    snprintf(state, sizeof state, "%d,%d,%d,%d,%d,%d", me, other, hands[me].fd[0], hands[me].fd[1], hands[me].fd[2], hands[me].fd[3]);
    note(s, " ");
    execl(arguments[0], arguments[0], arguments[1], arguments[2], skipped, at, state, NULL);
    _exit(8);
}

static void run(int from) {
    for (now = from; now < steps;) {
        struct model next = model;
        struct step s = plan(&next, seed, now, skip(now));
        bool is_mine = !two_processes || s.side == me;
        kind_now = s.kind;
        alarm(patience);
        switch (s.kind) {
        case NOTHING: break;
        case CONNECT: case BULK: case SLEEP: case FILL:
            act_both(&s);
            if (two_processes) {
                tell(0);
                hear();
            }
            break;
        case FORK:
            if (is_mine) {
                now = stand_in(&s, &next);
                continue;
            }
            hear();
            break;
        case JOIN:
            if (is_mine) {
                if (stands_in) exit(0);
                fresh_sets(me);
                note(&s, " ");
                tell(0);
            } else {
                hear();
            }
            break;
        case EXEC:
            if (is_mine) become_new(&s);
            attend();
            break;
        default:
            if (is_mine) {
                act(&s);
                act_waiting(&s);
                if (two_processes) tell(0);
            } else {
                hear();
            }
        }
        model = next;
        now++;
    }
}

/* Goes on where the program was that this one has replaced. */
static void resume(int at, const char *state) {
    int fd[SLOTS];
    if (sscanf(state, "%d,%d,%d,%d,%d,%d", &me, &other, &fd[0], &fd[1], &fd[2], &fd[3]) != 2 + SLOTS) _exit(9);
    memcpy(hands[me].fd, fd, sizeof fd);
    for (int i = 0; i < at; i++) plan(&model, seed, i, skip(i));
    if (at > 0) tell(0);
}

int main(int count, char **values) {
    if (count < 3) {
        fprintf(stderr, "usage: driver SEED STEPS [SKIP]\n");
        return 2;
    }
    arguments = values;
    seed = strtoull(values[1], NULL, 0);
    steps = atoi(values[2]);
    if (count > 3) skipped = values[3];
    if (getenv("PATIENCE")) patience = (unsigned)atoi(getenv("PATIENCE"));
    two_processes = model.two = seed % 4 != 0;
    catch_signals();
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < SLOTS; i++) hands[side].fd[i] = -1;
        hands[side].set[0] = hands[side].set[1] = -1;
    }
    int at = 0;
    if (count > 5) {
        at = atoi(values[4]);
        resume(at, values[5]);
    } else if (two_processes) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends)) return 1;
        me = fork() == 0;
        other = ends[me];
        close(ends[!me]);
        if (me == 1) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            char state[60];
            snprintf(state, sizeof state, "1,%d,-1,-1,-1,-1", other);
            execl(values[0], values[0], values[1], values[2], skipped, "0", state, NULL);
            _exit(8);
        }
    }
    for (int side = 0; side < 2; side++)
        if (!two_processes || side == me) fresh_sets(side);
    run(at);
    alarm(0);
    if (two_processes && me == 0 && !stands_in) {
        int status = 0;
        wait(&status);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 7;
    }
    return 0;
}
