/* Calls functions of another process: `rpc_client`. See rpc_server.c. */
#include "rpc_functions.h"
#include <stdio.h>

int main(void) {
    pw_domain *domain;
    pw_rpc_client *client;
    double result;
    long total;
    struct node *first = NULL;
    ptrdiff_t len;
    if (pw_join("shop", NULL, &domain) || pw_rpc_connect(domain, "web:math", NULL, &client)) goto failed;

    if (power_remote(client, PW_FOREVER, &result, 2, 10)) goto failed;
    printf("2^10 = %.0f\n", result);

    /* A list in the heap: the server reads it in place, at the addresses that it has here. */
    for (long value = 1; value <= 1000; value++) {
        struct node *node = (struct node *)pw_rpc_realloc(client, NULL, sizeof *node);
        if (!node) goto failed;
        node->value = value;
        node->next = first;
        first = node;
    }
    len = pw_rpc_call(client, "sum", &first, sizeof first, &total, sizeof total, PW_FOREVER);
    if (len != (ptrdiff_t)sizeof total) goto failed;
    printf("1 + ... + 1000 = %ld\n", total);

    if (pw_rpc_call(client, "divide", NULL, 0, NULL, 0, PW_FOREVER) != PW_UNKNOWN_METHOD) goto failed;
    if (pw_rpc_call(client, "sum", NULL, 0, &total, sizeof total, PW_FOREVER) != PW_RPC_FAILED(1)) goto failed;
    pw_rpc_disconnect(client);
    pw_leave(domain);
    return 0;
failed:
    fprintf(stderr, "%s\n", pw_last_error());
    return 1;
}
