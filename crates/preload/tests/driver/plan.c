/* What each step is. */
#define _GNU_SOURCE
#include "driver.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

uint32_t roll(struct rng *r) {
    uint64_t z = r->s += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 16);
}

static const struct { enum kind kind; int weight; const char *name; } kinds[] = {
    {SEND, 60, "send"}, {RECV, 70, "recv"}, {POLL, 20, "poll"}, {SELECT, 8, "select"}, {WATCH, 14, "watch"},
    {HARVEST, 26, "harvest"}, {PENDING, 10, "pending"}, {BLOCKING, 8, "blocking"}, {TIMEOUT, 4, "timeout"},
    {LOWAT, 2, "lowat"}, {SHUTDOWN, 2, "shutdown"}, {DUP, 5, "dup"}, {DUP_ONTO, 4, "dup-onto"}, {CLOSE, 5, "close"},
    {LAST_ERROR, 3, "last-error"}, {NAMES, 2, "names"}, {SWITCH, 24, "switch"}, {BULK, 6, "bulk"}, {SLEEP, 10, "sleep"},
    {INTERRUPT, 2, "interrupt"}, {FILL, 1, "fill"}, {FORK, 2, "fork"}, {PASS, 2, "pass"}, {EXEC, 1, "exec"}, {STDIO, 2, "stdio"},
    {LEAVE, 3, "leave"}, {LINGER, 1, "linger"}, {CONNECT, 0, "connect"}, {JOIN, 0, "join"}, {NOTHING, 0, "nothing"},
};

const char *name_of(enum kind kind) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].kind == kind) return kinds[i].name;
    return "?";
}

static enum kind choose(struct rng *r) {
    int total = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) total += kinds[i].weight;
    int at = (int)below(r, (uint32_t)total);
    for (size_t i = 0;; i++) {
        if (at < kinds[i].weight) return kinds[i].kind;
        at -= kinds[i].weight;
    }
}

uint64_t waiting_for(const struct model *m, int side) { return m->e[!side].sent - m->e[side].got; }

static int count(const bool *alive) {
    int n = 0;
    for (int i = 0; i < SLOTS; i++) n += alive[i];
    return n;
}

static int pick(const bool *alive, uint32_t at) {
    int n = count(alive);
    if (n == 0) return -1;
    int nth = (int)(at % (uint32_t)n);
    for (int i = 0;; i++)
        if (alive[i] && nth-- == 0) return i;
}

/* Sizes: mostly small, some up to all that may be under way. */
static size_t size(struct rng *r, size_t most) {
    size_t n;
    switch (below(r, 8)) {
    case 0: n = below(r, 3); break;
    case 1: case 2: case 3: n = 1 + below(r, 64); break;
    case 4: case 5: n = 1 + below(r, 2000); break;
    case 6: n = 1 + below(r, 9000); break;
    default: n = most;
    }
    return n < most ? n : most;
}

/* No byte more will come: reading does not block any more. */
static bool finished(const struct model *m, int side) {
    return m->e[side].shut_rd || m->e[!side].shut_wr || m->e[!side].gone;
}

static bool would_block(const struct model *m, int side, size_t n, int flags) {
    const struct end *e = &m->e[side];
    if ((flags & MSG_DONTWAIT) || e->nonblocking || e->timeout_ms || finished(m, side)) return false;
    size_t target = (flags & MSG_WAITALL) ? n : (n < (size_t)e->lowat ? n : (size_t)e->lowat);
    return waiting_for(m, side) < (target ? target : 1);
}

static void forget(struct end *e, int slot) {
    e->alive[slot] = false;
    e->watch[0][slot] = e->watch[1][slot] = 0;
}

static bool watched(const struct end *e, int slot) { return slot < 0 || e->watch[0][slot] || e->watch[1][slot]; }

static void start(struct model *m) {
    m->connected = true;
    m->episode++;
    for (int s = 0; s < 2; s++) {
        memset(&m->e[s], 0, sizeof m->e[s]);
        m->e[s].alive[0] = true;
        m->e[s].lowat = 1;
    }
}

/* Which sets have the connecting socket before it is connected: `flags` is what the first asks for, `call` what the second does, 0 for
 * nothing. `slot2` says whether the program waits in them before it connects. */
static void enter_before(struct model *m, struct step *s, struct rng *r) {
    static const uint32_t events[] = {EPOLLIN, EPOLLIN | EPOLLOUT, EPOLLOUT, EPOLLIN | EPOLLRDHUP};
    uint32_t level = below(r, 2) ? events[below(r, 4)] | (below(r, 3) ? 0 : EPOLLONESHOT) : 0;
    uint32_t edge = below(r, 2) ? events[below(r, 4)] | EPOLLET : 0;
    s->slot2 = (int)below(r, 2);
    s->flags = (int)(m->e[0].watch[0][0] = level);
    s->call = (int)(m->e[0].watch[1][0] = edge);
}

/* The model's part of a step; false if the step makes no sense now. */
static bool apply(struct model *m, struct step *s, struct rng *r) {
    struct end *e = &m->e[s->side], *peer = &m->e[!s->side];
    uint64_t avail = waiting_for(m, s->side), under_way = waiting_for(m, !s->side);
    bool quiet = !e->fork_ends && !peer->fork_ends;
    s->slot = pick(e->alive, roll(r));
    s->call = (int)below(r, 64);
    s->bits = roll(r);
    if (s->slot < 0) return false;
    switch (s->kind) {
    case SEND:
        s->n = size(r, CAP - under_way);
        s->flags = (below(r, 4) == 0 ? MSG_DONTWAIT : 0) | (below(r, 3) == 0 ? MSG_NOSIGNAL : 0);
        if (!e->shut_wr && !peer->gone) e->sent += s->n;
        return true;
    case RECV: {
        static const int flags[] = {0, 0, 0, 0, MSG_DONTWAIT, MSG_DONTWAIT, MSG_PEEK, MSG_PEEK | MSG_DONTWAIT, MSG_WAITALL,
                                    MSG_WAITALL | MSG_DONTWAIT, MSG_PEEK | MSG_WAITALL, MSG_TRUNC | MSG_DONTWAIT};
        s->flags = flags[below(r, sizeof flags / sizeof *flags)];
        s->n = below(r, 3) ? size(r, CAP) : size(r, avail < CAP ? avail : CAP);
        /* read(2) and its like take no flags; and they do not wait for nothing. */
        if (would_block(m, s->side, s->n, s->flags)) {
            if (below(r, 2)) s->flags |= MSG_DONTWAIT;
            else s->n = avail;
            if (would_block(m, s->side, s->n, s->flags)) return false;
        }
        if (!(s->flags & MSG_PEEK)) e->got += s->n < avail ? s->n : avail;
        return true;
    }
    case POLL: case SELECT:
        s->flags = (int)roll(r);
        return true;
    case WATCH: {
        int set = s->call & 1;
        if (e->watch[set][s->slot] && below(r, 3) == 0) {
            s->flags = 0;
            e->watch[set][s->slot] = 0;
            return true;
        }
        uint32_t events = EPOLLIN;
        switch (below(r, 4)) {
        case 0: events = EPOLLIN | EPOLLOUT; break;
        case 1: events = EPOLLOUT; break;
        case 2: events = EPOLLIN | EPOLLRDHUP; break;
        }
        if (set) events |= EPOLLET;
        else if (below(r, 5) == 0) events |= EPOLLONESHOT;
        s->flags = (int)events;
        e->watch[set][s->slot] = events;
        return true;
    }
    case HARVEST: case PENDING: case LAST_ERROR: case NAMES: case SWITCH:
        return true;
    case BLOCKING:
        e->nonblocking = s->call & 1;
        return true;
    case TIMEOUT:
        e->timeout_ms = e->timeout_ms ? 0 : TIMEOUT_MS;
        return true;
    case LOWAT:
        e->lowat = e->lowat > 1 ? 1 : 1 + (int)below(r, getenv("A_BYTE_IS_ENOUGH") ? 1 : 300);
        s->n = (size_t)e->lowat;
        return true;
    case SHUTDOWN:
        s->flags = (int)below(r, 5);
        s->flags = s->flags > 2 ? SHUT_WR : s->flags;
        if (s->flags != SHUT_RD) e->shut_wr = true;
        if (s->flags != SHUT_WR) e->shut_rd = true;
        return true;
    case DUP:
        s->slot2 = -1;
        for (int i = 0; i < SLOTS; i++)
            if (!e->alive[i]) s->slot2 = i;
        if (s->slot2 < 0) return false;
        e->alive[s->slot2] = true;
        return true;
    case DUP_ONTO:
        s->slot2 = pick(e->alive, roll(r));
        /* A descriptor that an epoll set watches is taken out before it is closed: its ghost is another story. */
        if (watched(e, s->slot2) && s->slot2 != s->slot) return false;
        return true;
    case CLOSE:
        if (count(e->alive) < 2 || watched(e, s->slot)) return false;
        forget(e, s->slot);
        return true;
    case LEAVE:
        if (e->fork_ends || (m->two && peer->fork_ends)) return false;
        e->gone = true;
        for (int i = 0; i < SLOTS; i++) forget(e, i);
        return true;
    case LINGER:
        return true;
    case BULK:
        if (e->shut_wr || peer->shut_rd || peer->gone || peer->lowat > 1 || pick(peer->alive, 0) < 0) return false;
        s->slot2 = pick(peer->alive, roll(r));
        s->n = below(r, 3) ? 1 + below(r, 60000) : 1 + below(r, LARGEST);
        e->sent += s->n;
        peer->got = e->sent;
        return true;
    case SLEEP: case FILL:
        /* `side` reads, its peer writes. */
        if (avail || finished(m, s->side) || e->lowat > 1 || pick(peer->alive, 0) < 0) return false;
        if (s->kind == SLEEP && !m->two) return false;
        s->slot2 = pick(peer->alive, roll(r));
        s->n = s->kind == FILL ? 0 : 1 + below(r, 4000);
        s->flags = (int)below(r, 8);
        if (s->kind == SLEEP && s->flags == 7) {
            s->n = 0;
            peer->shut_wr = true;
        }
        peer->sent += s->n;
        e->got += s->n;
        return true;
    case INTERRUPT:
        if (avail || finished(m, s->side) || e->nonblocking || e->timeout_ms) return false;
        return true;
    case FORK:
        if (!m->two || !quiet) return false;
        e->fork_ends = s->at + 3 + (int)below(r, 12);
        memcpy(e->keeps, e->alive, sizeof e->keeps);
        memset(e->watch, 0, sizeof e->watch);
        return true;
    case PASS:
        /* What lies unread in a ring while the peer does not answer cannot be handed over: such a connection is reset (README). */
        if (watched(e, s->slot) || avail || under_way) return false;
        return true;
    case EXEC:
        if (!m->two || !quiet || avail || under_way) return false;
        memset(e->watch, 0, sizeof e->watch);
        return true;
    case STDIO:
        if (e->nonblocking || e->timeout_ms) return false;
        if (s->call & 1) {
            if (e->shut_wr || peer->gone) return false;
            s->n = 1 + size(r, CAP - 1);
            if (s->n > CAP - under_way) return false;
            e->sent += s->n;
        } else {
            if (avail == 0) return false;
            s->n = 1 + below(r, (uint32_t)avail);
            e->got += s->n;
        }
        return true;
    default:
        return false;
    }
}

struct step plan(struct model *m, uint64_t seed, int at, bool skip) {
    struct rng r = {seed * 0xA24BAED4963EE407u + (uint64_t)at * 0x9FB21C651E98DF25u};
    roll(&r);
    struct step s = {.at = at};
    for (int side = 0; side < 2; side++)
        if (m->e[side].fork_ends == at && at) {
            struct end *e = &m->e[side];
            memcpy(e->alive, e->keeps, sizeof e->alive);
            memset(e->watch, 0, sizeof e->watch);
            e->fork_ends = 0;
            s.kind = JOIN;
            s.side = side;
            return s;
        }
    s.side = (int)below(&r, 2);
    s.kind = choose(&r);
    if (!m->connected) {
        s.kind = CONNECT;
        s.side = 0;
        s.bits = roll(&r);
        s.n = size(&r, 3000);
        start(m);
        m->e[0].sent = s.n;
        if (seed % 3 == 0) enter_before(m, &s, &r);
        return s;
    }
    if (skip || (m->e[0].gone && m->e[1].gone)) {
        if (m->e[0].gone && m->e[1].gone) m->connected = false;
        s.kind = NOTHING;
        return s;
    }
    /* One end has gone, or said that it will: the other follows before long. */
    const struct end *a = &m->e[0], *b = &m->e[1];
    uint32_t patience = a->gone || b->gone ? 8 : a->shut_wr || b->shut_wr || a->shut_rd || b->shut_rd ? 20 : 0;
    if (patience && below(&r, patience) == 0) s.kind = LEAVE;
    struct model before = *m;
    if (!apply(m, &s, &r)) {
        *m = before;
        s.kind = NOTHING;
    }
    return s;
}
