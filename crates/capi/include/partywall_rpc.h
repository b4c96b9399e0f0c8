/* Partywall: calls that pass pointers. A program calls a function of another process without serialising the function's data.
 *
 * The guide is docs/rpc.md of the source tree; partywall_rpc(3) describes each function. RESULTS, TIME-OUTS and FORK are as in partywall.h,
 * with one exception: after PW_TIMED_OUT the server may still execute the call, and its result is lost.
 *
 * MEMORY. pw_rpc_realloc allocates from the client's heap. The server reads this heap in place and cannot write it. Up to 40 bytes of arguments
 * are copied into the call itself. Longer arguments are passed by reference if they lie in the heap, and are copied into the heap otherwise.
 *
 * TRUST. A function gets a copy of its arguments. pw_rpc_at checks that all bytes at a pointer lie in the client's heap, and copies them; it returns
 * NULL for any other pointer. A method with the flag PW_RPC_TRUSTING gets pointers into the client's heap instead. No copy is made, but the client
 * can change the bytes at any time. Use this flag only between programs that trust each other.
 *
 * THREADS. Any thread may use a client or a server. A server has one thread that accepts clients, and one thread for each client. The client's thread
 * runs the functions that this client calls, so functions that different clients call can run at the same time.
 */
#ifndef PARTYWALL_RPC_H
#define PARTYWALL_RPC_H

#include <limits.h>
#include <partywall.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pw_rpc_client pw_rpc_client;   /* A connection to a server. */
typedef struct pw_rpc_server pw_rpc_server;   /* A service whose functions clients call. */
typedef struct pw_rpc_request pw_rpc_request; /* A call, while its function runs. */

/* A function of a server. `args` are the `len` bytes of arguments. It returns 0, or the application's own error code,
 * from 1 to INT_MAX - 1000. */
typedef int (*pw_rpc_function)(pw_rpc_request *request, const void *args, size_t len, void *context);

/* The result of pw_rpc_call if the function has failed with `code`, and the `code` of such a result. */
#define PW_RPC_FAILED(code) (-1000 - (code))
#define PW_RPC_CODE(result) ((int)(-1000 - (result)))

enum pw_rpc_flag { PW_RPC_GUARDED = 0, PW_RPC_TRUSTING = 1 };

/* A method that a server offers. */
typedef struct pw_rpc_method {
    const char *name;
    pw_rpc_function function;
    void *context;  /* Passed to the function. */
    uint64_t flags; /* Of `enum pw_rpc_flag`. */
} pw_rpc_method;

/* Connects to `DOMAIN:SERVICE` and waits until the server has accepted, at most ten seconds. */
int pw_rpc_connect(const pw_domain *domain, const char *target, const pw_options *options, pw_rpc_client **client);

/* Changes the size of memory in the client's heap, as realloc: NULL allocates, size 0 frees and returns NULL. NULL also on failure. */
void *pw_rpc_realloc(pw_rpc_client *client, void *memory, size_t size);

/* Calls a method. Copies its result to `result`, and returns the length of the result in bytes. `result` may be where `args` is. `timeout_ms` limits
 * the whole call; 0 waits about one microsecond. After PW_TIMED_OUT the server may still execute the call, and its result is lost. After PW_TOO_LARGE
 * the result is lost, too. Fails with PW_RPC_FAILED(code) if the function has returned `code`, and with PW_UNKNOWN_METHOD, PW_BAD_POINTER,
 * PW_NO_MEMORY, PW_TIMED_OUT, PW_TOO_LARGE, PW_REFUSED, PW_CLOSED, PW_DEAD, PW_MOVED, PW_CORRUPT. */
ptrdiff_t pw_rpc_call(pw_rpc_client *client, const char *method, const void *args, size_t len, void *result, size_t size, int timeout_ms);

/* Closes the connection and frees its heap. */
void pw_rpc_disconnect(pw_rpc_client *client);

/* Offers methods as a service, on threads of the library. The array and the names are copied. */
int pw_rpc_serve(const pw_domain *domain, const char *service, const pw_rpc_method *methods, size_t count, pw_rpc_server **server);

/* In a function: memory for a result of `len` bytes, to be filled before the function returns. A second call for the same request frees the memory
 * of the first. NULL if there is not enough memory. */
void *pw_rpc_result(pw_rpc_request *request, size_t len);

/* In a function: `len` bytes at an address of the client, valid until the function returns. NULL if a byte lies outside the client's heap, or if the
 * call has used up a limit: 65,536 pointers, or 256 MiB of copies. */
const void *pw_rpc_at(pw_rpc_request *request, const void *address, size_t len);

/* Closes all connections, waits for running functions, and frees the server. */
void pw_rpc_stop(pw_rpc_server *server);

/* PW_RPC(double, power, double, base, double, exponent) declares the function
 *     double power(double base, double exponent);
 * which the server defines, and defines
 *     int power_remote(pw_rpc_client *client, int timeout_ms, double *result, double base, double exponent);
 * which calls it from a client, and `power_method()`, by which a server offers it. It takes one to four parameters, of types that may be copied as
 * bytes and that both programs lay out in the same way. */
#define PW_RPC(type, name, ...) PW_RPC_PICK_(__VA_ARGS__, PW_RPC_4_, 0, PW_RPC_3_, 0, PW_RPC_2_, 0, PW_RPC_1_, 0, 0)(type, name, __VA_ARGS__)
#define PW_RPC_PICK_(a, b, c, d, e, f, g, h, macro, ...) macro
#define PW_RPC_1_(type, name, t1, a) PW_RPC_DEFINE_(type, name, (t1 a), (in.a), t1 a;, in.a = a;)
#define PW_RPC_2_(type, name, t1, a, t2, b) PW_RPC_DEFINE_(type, name, (t1 a, t2 b), (in.a, in.b), t1 a; t2 b;, in.a = a; in.b = b;)
#define PW_RPC_3_(type, name, t1, a, t2, b, t3, c) \
    PW_RPC_DEFINE_(type, name, (t1 a, t2 b, t3 c), (in.a, in.b, in.c), t1 a; t2 b; t3 c;, in.a = a; in.b = b; in.c = c;)
#define PW_RPC_4_(type, name, t1, a, t2, b, t3, c, t4, d) \
    PW_RPC_DEFINE_(type, name, (t1 a, t2 b, t3 c, t4 d), (in.a, in.b, in.c, in.d), t1 a; t2 b; t3 c; t4 d;, \
                   in.a = a; in.b = b; in.c = c; in.d = d;)
#define PW_RPC_BARE_(...) __VA_ARGS__
#define PW_RPC_DEFINE_(type, name, parameters, fields, members, assign) \
    type name parameters; \
    struct name##_arguments_ { members }; \
    static inline int name##_remote(pw_rpc_client *client, int timeout_ms, type *result, PW_RPC_BARE_ parameters) { \
        struct name##_arguments_ in; \
        ptrdiff_t len; \
        memset(&in, 0, sizeof in); \
        assign \
        len = pw_rpc_call(client, #name, &in, sizeof in, result, sizeof *result, timeout_ms); \
        if (len < 0) return len < INT_MIN ? PW_CORRUPT : (int)len; \
        return (size_t)len == sizeof *result ? PW_OK : PW_CORRUPT; \
    } \
    static inline int name##_skeleton_(pw_rpc_request *request, const void *args, size_t len, void *context) { \
        struct name##_arguments_ in; \
        type *result; \
        (void)context; \
        if (len != sizeof in) return 1; \
        memcpy(&in, args, sizeof in); \
        result = (type *)pw_rpc_result(request, sizeof *result); \
        if (!result) return 2; \
        *result = name fields; \
        return 0; \
    } \
    static inline pw_rpc_method name##_method(void) { \
        pw_rpc_method method = {#name, name##_skeleton_, NULL, PW_RPC_GUARDED}; \
        return method; \
    }

#ifdef __cplusplus
}
#endif

#endif
