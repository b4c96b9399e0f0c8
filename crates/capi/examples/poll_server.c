/* Echoes several connections at the same time in one thread: poll(2) on descriptors, and calls that do not wait. */
#include <partywall.h>
#include <poll.h>
#include <stdio.h>

#define MOST 32

/* A visitor, and the bytes that are still to be sent back. */
struct visitor {
    pw_stream *stream;
    char bytes[4096];
    size_t from, to;
    int blocked; /* The code of the call that has to be repeated: PW_EMPTY or PW_FULL. PW_OK: others had a turn first. */
};

/* Goes on until a call would wait, or for some turns if none would. Returns 0 when the visitor has gone. */
static int serve(struct visitor *v) {
    int turn;
    for (turn = 0; turn < 64; turn++) {
        ptrdiff_t n;
        if (v->from == v->to) {
            n = pw_read(v->stream, v->bytes, sizeof v->bytes, 0);
            v->from = 0;
            v->to = n > 0 ? (size_t)n : 0;
        } else {
            n = pw_write(v->stream, v->bytes + v->from, v->to - v->from, 0);
            v->from += n > 0 ? (size_t)n : 0;
        }
        if (n == PW_EMPTY || n == PW_FULL) {
            v->blocked = (int)n;
            return 1;
        }
        if (n <= 0) {
            return 0;
        }
    }
    v->blocked = PW_OK;
    return 1;
}

int main(void) {
    static struct visitor visitors[MOST];
    pw_domain *domain;
    pw_listener *listener;
    int count = 0, i;
    if (pw_join("web", NULL, &domain) != PW_OK || pw_listen(domain, "echo", NULL, &listener) != PW_OK) {
        fprintf(stderr, "poll_server: %s\n", pw_last_error());
        return 1;
    }
    printf("offering web:echo\n");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[MOST + 1];
        int busy = 0;
        /* Calls first, then poll: a descriptor is only worth polling after its call had nothing to do. */
        for (i = 0; i < count;) {
            if (serve(&visitors[i])) {
                i++;
            } else {
                pw_close(visitors[i].stream);
                visitors[i] = visitors[--count];
            }
        }
        while (count < MOST && pw_accept(listener, 0, &visitors[count].stream) == PW_OK) {
            visitors[count].from = visitors[count].to = 0;
            if (serve(&visitors[count])) {
                count++;
            } else {
                pw_close(visitors[count].stream);
            }
        }
        for (i = 0; i < count; i++) {
            const int full = visitors[i].blocked == PW_FULL;
            busy |= visitors[i].blocked == PW_OK;
            fds[i].fd = full ? pw_write_fd(visitors[i].stream) : pw_read_fd(visitors[i].stream);
            fds[i].events = POLLIN;
        }
        fds[count].fd = count < MOST ? pw_listener_fd(listener) : -1;
        fds[count].events = POLLIN;
        poll(fds, (nfds_t)count + 1, busy ? 0 : -1);
    }
}
