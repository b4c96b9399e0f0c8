/* Sends its first argument to web:echo, and prints the answer. echo_server.c has the commands to build and run both. */
#include <partywall.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what) {
    fprintf(stderr, "echo_client: %s: %s\n", what, pw_last_error());
    return 1;
}

int main(int argc, char **argv) {
    const char *words = argc > 1 ? argv[1] : "hello";
    const ptrdiff_t length = (ptrdiff_t)strlen(words);
    char buffer[4096];
    pw_domain *domain;
    pw_stream *stream;
    ptrdiff_t n;
    if (pw_join("visitor", NULL, &domain) != PW_OK) {
        return fail("cannot join");
    }
    if (pw_connect(domain, "web:echo", NULL, &stream) != PW_OK) {
        return fail("cannot connect");
    }
    if (pw_write(stream, words, (size_t)length, PW_FOREVER) != length) {
        return fail("cannot write");
    }
    pw_shutdown(stream, PW_SHUT_WRITE); /* Nothing follows: the server reads the end. */
    while ((n = pw_read(stream, buffer, sizeof buffer, PW_FOREVER)) > 0) {
        fwrite(buffer, 1, (size_t)n, stdout);
    }
    if (n < 0) {
        return fail("cannot read");
    }
    printf("\n");
    pw_close(stream);
    pw_leave(domain);
    return 0;
}
