/* Calls back, seen from C. It is C11 and C++17. PARTYWALL_BROKER names a broker. */
#include <partywall_rpc_back.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void failed(int line, const char *what) {
    fprintf(stderr, "calls_back.c:%d: %s; last error: %s\n", line, what, pw_last_error());
    exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))

enum { SIZE = 100000 };
static const int GUARD = 60000; /* Only a guard against hanging. */

/* Sums what the client's `part` returns for 0 to 9. */
static int sum(pw_rpc_request *request, const void *args, size_t len, void *context) {
    int i, total = 0, part;
    int *result;
    (void)args, (void)len, (void)context;
    for (i = 0; i < 10; i++) {
        CHECK(pw_rpc_call_back(request, "part", &i, sizeof i, &part, sizeof part, GUARD) == sizeof part);
        total += part;
    }
    result = (int *)pw_rpc_result(request, sizeof total);
    CHECK(result);
    *result = total;
    return 0;
}

/* Passes and gets more bytes than a record carries. */
static int large(pw_rpc_request *request, const void *args, size_t len, void *context) {
    char *bytes = (char *)malloc(SIZE);
    ptrdiff_t n;
    (void)args, (void)len, (void)context;
    memset(bytes, 7, SIZE);
    n = pw_rpc_call_back(request, "echo", bytes, SIZE, bytes, SIZE, GUARD);
    CHECK(n == SIZE && bytes[0] == 8 && bytes[SIZE - 1] == 8);
    CHECK(pw_rpc_call_back(request, "echo", bytes, SIZE, bytes, SIZE - 1, GUARD) == PW_TOO_LARGE);
    free(bytes);
    return 0;
}

/* The outcomes of calls back. */
static int outcomes(pw_rpc_request *request, const void *args, size_t len, void *context) {
    (void)args, (void)len, (void)context;
    CHECK(pw_rpc_call_back(request, "nothing", NULL, 0, NULL, 0, GUARD) == PW_UNKNOWN_METHOD);
    CHECK(pw_rpc_call_back(request, "fail", NULL, 0, NULL, 0, GUARD) == PW_RPC_FAILED(7));
    CHECK(pw_rpc_call_back(request, "enter", NULL, 0, NULL, 0, GUARD) == 0);
    CHECK(pw_rpc_call_back(NULL, "enter", NULL, 0, NULL, 0, GUARD) == PW_INVALID);
    CHECK(pw_rpc_call_back(request, NULL, NULL, 0, NULL, 0, GUARD) == PW_INVALID);
    return 0;
}

/* Returns the result of a call back, which a client without methods refuses. */
static int ask(pw_rpc_request *request, const void *args, size_t len, void *context) {
    (void)args, (void)len, (void)context;
    return pw_rpc_call_back(request, "part", NULL, 0, NULL, 0, GUARD) == PW_REFUSED ? 0 : 1;
}

static int part(pw_rpc_request *request, const void *args, size_t len, void *context) {
    int *result = (int *)pw_rpc_result(request, sizeof(int));
    int n;
    CHECK(result && len == sizeof n);
    memcpy(&n, args, sizeof n);
    *result = n * *(int *)context;
    return 0;
}

static int echo(pw_rpc_request *request, const void *args, size_t len, void *context) {
    char *result = (char *)pw_rpc_result(request, len);
    size_t i;
    (void)context;
    CHECK(result);
    for (i = 0; i < len; i++) result[i] = (char)(((const char *)args)[i] + 1);
    return 0;
}

static int fail(pw_rpc_request *request, const void *args, size_t len, void *context) {
    (void)request, (void)args, (void)len, (void)context;
    return 7;
}

static pw_rpc_client *client;

static int enter(pw_rpc_request *request, const void *args, size_t len, void *context) {
    (void)request, (void)args, (void)len, (void)context;
    CHECK(pw_rpc_call(client, "ask", NULL, 0, NULL, 0, GUARD) == PW_REFUSED);
    return 0;
}

int main(void) {
    int ten = 10, total = 0;
    pw_domain *web;
    pw_rpc_server *server;
    pw_rpc_client *without;
    pw_rpc_method served[4] = {{"sum", sum, NULL, 0}, {"large", large, NULL, 0}, {"outcomes", outcomes, NULL, 0}, {"ask", ask, NULL, 0}};
    pw_rpc_method offered[4] = {{"part", part, NULL, 0}, {"echo", echo, NULL, 0}, {"fail", fail, NULL, 0}, {"enter", enter, NULL, 0}};
    offered[0].context = &ten;
    CHECK(pw_join("web", NULL, &web) == PW_OK);
    CHECK(pw_rpc_serve(web, "math", served, 4, &server) == PW_OK);
    CHECK(pw_rpc_connect_back(web, "web:math", NULL, offered, 4, &client) == PW_OK);
    CHECK(pw_rpc_call(client, "sum", NULL, 0, &total, sizeof total, GUARD) == sizeof total);
    CHECK(total == 450);
    CHECK(pw_rpc_call(client, "large", NULL, 0, NULL, 0, GUARD) == 0);
    CHECK(pw_rpc_call(client, "outcomes", NULL, 0, NULL, 0, GUARD) == 0);
    CHECK(pw_rpc_connect(web, "web:math", NULL, &without) == PW_OK);
    CHECK(pw_rpc_call(without, "ask", NULL, 0, NULL, 0, GUARD) == 0);
    pw_rpc_disconnect(without);
    CHECK(pw_rpc_connect_back(web, "web:math", NULL, NULL, 1, &without) == PW_INVALID);
    offered[1].function = NULL;
    CHECK(pw_rpc_connect_back(web, "web:math", NULL, offered, 4, &without) == PW_INVALID);
    pw_rpc_disconnect(client);
    pw_rpc_stop(server);
    pw_leave(web);
    return 0;
}
