/* Echoes all bytes of one connection after the other. The other end is echo_client.c.
 *
 *     cc -Wall -o echo_server echo_server.c $(pkg-config --cflags --libs partywall)
 *     partywalld &        # the broker, one per host
 *     ./echo_server
 */
#include <partywall.h>
#include <stdio.h>

static int fail(const char *what) {
    fprintf(stderr, "echo_server: %s: %s\n", what, pw_last_error());
    return 1;
}

static int echo(pw_stream *stream) {
    char buffer[65536];
    ptrdiff_t n;
    while ((n = pw_read(stream, buffer, sizeof buffer, PW_FOREVER)) > 0) {
        if (pw_write(stream, buffer, (size_t)n, PW_FOREVER) != n) {
            return -1;
        }
    }
    return n < 0 ? -1 : 0; /* 0: the visitor has ended its direction. */
}

int main(void) {
    pw_domain *domain;
    pw_listener *listener;
    if (pw_join("web", NULL, &domain) != PW_OK) {
        return fail("cannot join");
    }
    if (pw_listen(domain, "echo", NULL, &listener) != PW_OK) {
        return fail("cannot listen");
    }
    printf("offering web:echo\n");
    fflush(stdout);
    for (;;) {
        pw_stream *stream;
        pw_peer peer = PW_PEER_INIT;
        if (pw_accept(listener, PW_FOREVER, &stream) != PW_OK) {
            return fail("cannot accept");
        }
        pw_stream_peer(stream, &peer);
        printf("%s has come\n", peer.domain);
        fflush(stdout);
        if (echo(stream) < 0) {
            fail("connection ended"); /* Only this visitor's. */
        }
        pw_close(stream);
    }
}
