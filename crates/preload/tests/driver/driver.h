/*
 * A repeatable sequence of socket calls on the two ends of TCP connections.
 *
 *   seed --> plan.c: what step number i is, from (seed, i) and a model of both ends
 *              |
 *              v
 *            main.c: whose turn it is; one process for both ends, or one for each, in lockstep
 *              |
 *              v
 *            act.c, wait.c: the calls themselves, and one line on what each returned
 *
 * Step i depends on the seed and i only through the model, so a sequence with some steps left out is a sequence too: that is how a
 * failing one is made short.
 */
#ifndef DRIVER_H
#define DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SLOTS = 4, CAP = 16000, LARGEST = 1 << 20, TIMEOUT_MS = 12 };

/* What a step does. */
enum kind {
    NOTHING, SEND, RECV, POLL, SELECT, WATCH, HARVEST, PENDING, BLOCKING, TIMEOUT, LOWAT, SHUTDOWN, DUP, DUP_ONTO, CLOSE,
    LAST_ERROR, NAMES, SWITCH, BULK, SLEEP, INTERRUPT, FILL, FORK, JOIN, PASS, EXEC, STDIO, LEAVE, CONNECT, LINGER, KINDS
};

struct step {
    int at;             /* its number */
    enum kind kind;
    int side;           /* who does it: 0 connects, 1 accepts */
    int slot, slot2;    /* which of its descriptors */
    int call;           /* by which of the calls that can do it */
    int flags;          /* MSG_ flags, poll events, and the like */
    size_t n;           /* bytes */
    unsigned bits;      /* the rest of the randomness */
};

/* What is known of one end before the step, whatever the calls return. */
struct end {
    bool alive[SLOTS];
    bool gone;                      /* all descriptors closed, in every process */
    bool nonblocking, shut_rd, shut_wr;
    int timeout_ms, lowat;
    uint64_t sent, got;
    uint32_t watch[2][SLOTS];       /* what each epoll set asks of each descriptor; 0: it is not in the set */
    int fork_ends;                  /* a child stands in until this step; 0: it does not */
    bool keeps[SLOTS];              /* what the parent has meanwhile */
};

struct model {
    bool connected;
    int episode;        /* which connection */
    bool two;           /* one process for each end */
    struct end e[2];
};

struct rng { uint64_t s; };
uint32_t roll(struct rng *r);
static inline uint32_t below(struct rng *r, uint32_t n) { return roll(r) % n; }

/* Decides step `at`, and moves the model past it. */
struct step plan(struct model *m, uint64_t seed, int at, bool skip);
/* Bytes that `side` can read. */
uint64_t waiting_for(const struct model *m, int side);
const char *name_of(enum kind kind);

/* The byte at `at` of what `side` sends in an episode. */
static inline unsigned char pattern(int episode, int side, uint64_t at) {
    uint64_t x = (at >> 3) * 0x9E3779B97F4A7C15u + (uint64_t)(episode * 2 + side + 1) * 0xD1B54A32D192ED03u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return (unsigned char)(x >> (8 * (at & 7)) >> 3);
}

/* What a process has of an end. */
struct hands {
    int fd[SLOTS];
    int set[2];         /* epoll: level-triggered, edge-triggered */
};

extern struct hands hands[2];
extern struct model model;      /* before the step in hand */
extern bool two_processes;
extern volatile int pipe_signals, user_signals;

/* The other process: a number each way. */
void tell(uint64_t number);
uint64_t hear(void);

/* One line of the trace. */
void note(const struct step *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ... of a step that both processes speak of. */
void note_as(const struct step *s, int side, const char *format, ...) __attribute__((format(printf, 3, 4)));

void fill_pattern(unsigned char *to, int side, uint64_t from, size_t n);
/* Where the bytes first differ from the pattern; -1 if nowhere. */
long differs(const unsigned char *bytes, int side, uint64_t from, size_t n);
/* Sends by a call chosen by `call`; as send(2). */
long send_by(int call, int fd, const unsigned char *bytes, size_t n, int flags, unsigned bits);
/* Receives likewise. */
long recv_by(int call, int fd, unsigned char *to, size_t n, int flags, unsigned bits, char *more, size_t more_size);
enum { SEND_CALLS = 11, RECV_CALLS = 8 };
extern unsigned char buffer[LARGEST + 64];

void act(const struct step *s);             /* act.c: everything that one side does alone */
void act_waiting(const struct step *s);     /* wait.c: readiness */
void act_both(const struct step *s);        /* both.c: what takes both sides at a time */
void say_events(char *to, size_t size, unsigned events);
int wait_readable(int fd, int how, int timeout_ms, unsigned *events);

#endif
