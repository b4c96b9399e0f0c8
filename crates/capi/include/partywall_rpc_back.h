/* Partywall: calls back. A function that a server executes calls functions of its client, while the client waits for the call.
 *
 * These functions complete partywall_rpc.h; partywall_rpc_back(3) describes each. The server calls a function of the client while a thread of the
 * client waits in pw_rpc_call. This thread executes the function. The function gets a `pw_rpc_request`, as a function of a server does. The function
 * MUST NOT call pw_rpc_call with the same client: that fails with PW_REFUSED.
 */
#ifndef PARTYWALL_RPC_BACK_H
#define PARTYWALL_RPC_BACK_H

#include <partywall_rpc.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Connects as pw_rpc_connect, and offers methods to the server. The array and the names are copied. */
int pw_rpc_connect_back(const pw_domain *domain, const char *target, const pw_options *options, const pw_rpc_method *methods, size_t count, pw_rpc_client **client);

/* In a function of a server: calls a method of the client, as pw_rpc_call calls one of a server. After PW_TIMED_OUT the same call cannot call back
 * again until the client has answered. */
ptrdiff_t pw_rpc_call_back(pw_rpc_request *request, const char *method, const void *args, size_t len, void *result, size_t size, int timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
