/* Offers functions to other processes: `rpc_server`. See rpc_client.c. */
#include "rpc_functions.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

double power(double base, double exponent) {
    return pow(base, exponent);
}

/* Sums a list that lies in the client's heap. */
static int sum(pw_rpc_request *request, const void *args, size_t len, void *context) {
    const struct node *next;
    long *result;
    long total = 0;
    (void)context;
    if (len != sizeof next) return 1;
    memcpy(&next, args, sizeof next);
    while (next) {
        const struct node *node = (const struct node *)pw_rpc_at(request, next, sizeof *node);
        if (!node) return 2;
        total += node->value;
        next = node->next;
    }
    result = (long *)pw_rpc_result(request, sizeof *result);
    if (!result) return 3;
    *result = total;
    return 0;
}

int main(void) {
    pw_domain *domain;
    pw_rpc_server *server;
    pw_rpc_method methods[] = {power_method(), {"sum", sum, NULL, PW_RPC_GUARDED}};
    if (pw_join("web", NULL, &domain) || pw_rpc_serve(domain, "math", methods, 2, &server)) {
        fprintf(stderr, "%s\n", pw_last_error());
        return 1;
    }
    puts("serving web:math");
    fflush(stdout);
    pause();
    pw_rpc_stop(server);
    pw_leave(domain);
    return 0;
}
