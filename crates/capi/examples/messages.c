/* Orders as messages: `messages serve` prints each message, `messages send WORD...` sends each word as one message. */
#include <partywall.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what) {
    fprintf(stderr, "messages: %s: %s\n", what, pw_last_error());
    return 1;
}

static int serve(pw_domain *domain) {
    pw_message_listener *listener;
    pw_message_socket *socket;
    char order[256];
    size_t length;
    int rc;
    if (pw_message_listen(domain, "orders", NULL, &listener) != PW_OK) {
        return fail("cannot listen");
    }
    printf("offering %s:orders\n", pw_domain_name(domain));
    fflush(stdout);
    if (pw_message_accept(listener, PW_FOREVER, &socket) != PW_OK) {
        return fail("cannot accept");
    }
    while ((rc = pw_receive(socket, order, sizeof order, &length, PW_FOREVER)) == PW_OK) {
        printf("order: %.*s\n", (int)length, order);
    }
    pw_message_close(socket);
    pw_message_listener_close(listener);
    return rc == PW_CLOSED ? 0 : fail("cannot receive"); /* PW_CLOSED: the sender has finished. */
}

static int send_words(pw_domain *domain, int count, char **words) {
    pw_message_socket *socket;
    int i;
    if (pw_message_connect(domain, "shop:orders", NULL, &socket) != PW_OK) {
        return fail("cannot connect");
    }
    for (i = 0; i < count; i++) {
        if (pw_send(socket, words[i], strlen(words[i]), PW_FOREVER) != PW_OK) {
            return fail("cannot send");
        }
    }
    pw_message_close(socket);
    return 0;
}

int main(int argc, char **argv) {
    pw_domain *domain;
    const int serves = argc > 1 && strcmp(argv[1], "serve") == 0;
    int rc;
    if (argc < 2) {
        fprintf(stderr, "usage: messages serve | messages send WORD...\n");
        return 2;
    }
    if (pw_join(serves ? "shop" : "visitor", NULL, &domain) != PW_OK) {
        return fail("cannot join");
    }
    rc = serves ? serve(domain) : send_words(domain, argc - 2, argv + 2);
    pw_leave(domain);
    return rc;
}
