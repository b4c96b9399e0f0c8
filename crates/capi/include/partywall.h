/* Partywall: streams and messages between processes, containers and virtual machines of one host, through shared memory.
 *
 * The guide is docs/c.md of the source tree; partywall(3) and the pages that it names describe each function.
 *
 * RESULTS. A function that returns int or ptrdiff_t returns a code of `enum pw_code` on failure; all codes are negative. On success it
 * returns 0, a count or a descriptor. pw_last_error() returns the text of the thread's last failure: what failed, why, and what to do.
 * errno has no meaning after a call. A peer that has gone raises no signal: there is no SIGPIPE.
 *
 * TIME-OUTS. `timeout_ms` is as in poll(2): PW_FOREVER (or any negative number) waits, 0 does not wait, and a positive number is the
 * longest wait in milliseconds. Signals do not interrupt a wait. After PW_TIMED_OUT nothing is lost.
 *
 * POLLING. Call with 0 until the result is PW_EMPTY or PW_FULL. From then on the descriptor (pw_read_fd, pw_write_fd, pw_listener_fd, ...)
 * becomes READABLE (POLLIN, also for a writer) when the call is worth repeating. The library reads the descriptor; the program only polls
 * it. The descriptor may become readable without a reason: then the next call returns PW_EMPTY or PW_FULL again.
 *
 * THREADS. Several threads may use a domain at the same time. Only one thread at a time may use a listener. Only one thread at a time may use each
 * direction of a stream or a message socket: one thread may read while another one writes. While a thread closes a handle, no other thread may use
 * it. The first pw_join or pw_pair starts a thread of the library, partywall-keeper, which inherits the signal mask of the calling thread. While the
 * broker is gone, the library has a second thread, which tries to join again. A program whose signals must arrive in a chosen thread blocks them
 * before the first pw_join or pw_pair.
 *
 * FORK. After a fork, every function that takes or makes a handle returns PW_FORKED in the child, if the parent had called pw_join or
 * pw_pair before. Functions that close do nothing there, so the parent's connections stay as they are. The child can call exec. A program
 * that forks workers forks them before its first pw_join.
 *
 * EXIT. A process that ends without closing a connection has died, for its peer: the peer reads the written bytes, and then gets PW_DEAD.
 */
#ifndef PARTYWALL_H
#define PARTYWALL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Why a call failed. Later versions may add codes. */
enum pw_code {
    PW_OK = 0,
    PW_EMPTY = -1,      /* No data now, and the timeout is 0. */
    PW_FULL = -2,       /* No space now, and the timeout is 0. */
    PW_TIMED_OUT = -3,  /* The time allowed has passed. */
    PW_CLOSED = -4,     /* The peer, or this side, has ended this direction. */
    PW_DEAD = -5,       /* The peer has ended without closing. All bytes that it had written have been read. */
    PW_CORRUPT = -6,    /* The peer has broken the protocol. Only this connection is affected. */
    PW_ACCUSED = -7,    /* The peer reports that this side has broken the protocol. */
    PW_TOO_LARGE = -8,  /* More than the ring, the message or the buffer can hold. */
    PW_INVALID = -9,    /* An argument makes no sense. */
    PW_NO_BROKER = -10, /* No broker answers. */
    PW_NOT_FOUND = -11, /* No such domain or service now. */
    PW_DENIED = -12,    /* The broker's policy does not allow it. */
    PW_IN_USE = -13,    /* Another program offers this service. */
    PW_REFUSED = -14,   /* The broker has refused for another reason, such as a full backlog. */
    PW_NO_MEMORY = -15, /* No memory of the requested kind. */
    PW_SYSTEM = -16,    /* The system has refused something. */
    PW_FORKED = -17,    /* This process is the child of a fork: see FORK above. */
    PW_BUG = -18,       /* A bug in Partywall. */
    PW_UNKNOWN_METHOD = -19, /* The server has no such method (partywall_rpc.h). */
    PW_BAD_POINTER = -20, /* A pointer leads outside the heap of the side that sent it (partywall_rpc.h). */
    PW_MOVED = -21      /* In place of PW_DEAD, between virtual machines: a machine at one end is being migrated. Connect again by the same name. */
};

/* Waits until there is a result. */
#define PW_FOREVER (-1)

/* The directions that pw_shutdown ends. */
#define PW_SHUT_READ 1
#define PW_SHUT_WRITE 2
#define PW_SHUT_BOTH 3

typedef struct pw_domain pw_domain;                     /* Membership of a domain. */
typedef struct pw_listener pw_listener;                 /* A service that streams connect to. */
typedef struct pw_stream pw_stream;                     /* A connection that carries bytes in order. */
typedef struct pw_message_listener pw_message_listener; /* A service that message sockets connect to. */
typedef struct pw_message_socket pw_message_socket;     /* A connection that carries messages, each whole. */

/* Choices for a connection or a listener. NULL in place of a pointer to it chooses all defaults. Begin with PW_OPTIONS_INIT:
 *     pw_options options = PW_OPTIONS_INIT;
 *     options.ring_max = 1 << 20;
 */
typedef struct pw_options {
    uint32_t size;          /* sizeof(pw_options) */
    int32_t spin_us;        /* The longest spin before a sleep, in microseconds. 0 sleeps at once; negative: the default, 100. */
    uint64_t ring_initial;  /* First size of this side's ring in bytes. 0: the default, 16 KiB. Sizes become powers of two, 4 KiB to 1 GiB. */
    uint64_t ring_max;      /* Its largest size in bytes. 0: the default, 8 MiB. For a ring of a fixed size, set both to the same value. */
    uint64_t max_peer_ring; /* The most bytes of new rings to accept from the peer. 0: the default, 64 MiB. */
    uint16_t backlog;       /* Listening: connections that may wait for an accept, at most 128. 0: 128. */
    uint8_t one_way;        /* Connecting: not 0 if only this side writes. */
    uint8_t huge_pages;     /* Not 0: takes the ring from huge pages, which the operator has reserved. */
    uint32_t sleeps_often;  /* Not 0: writes and reads have a fence (10 ns), and a sleep does not interrupt other processors (microseconds). */
} pw_options;

#define PW_OPTIONS_INIT { (uint32_t)sizeof(pw_options), -1, 0, 0, 0, 0, 0, 0, 0 }

/* The other side of a connection, as the broker vouches for it. Begin with PW_PEER_INIT. */
typedef struct pw_peer {
    uint32_t size;       /* sizeof(pw_peer) */
    uint32_t domain_id;  /* The number of its domain. */
    const char *domain;  /* The name of its domain. Valid until the connection is closed. */
    const char *service; /* The service. Valid until the connection is closed. */
    uint64_t epoch;      /* A domain that has ended and joined again has a greater epoch. */
    int64_t uid;         /* Number of its user, on the host or in its container: 0 can be the root of a container. For a peer on another host of
                          * the cluster: the gateway's user. -1 on the connecting side, and for a peer in a virtual machine. */
    int64_t pid;         /* Number of its process when it connected, on the host or in its virtual machine. -1 on the connecting side. */
    int64_t certain_uid; /* Number of its user on the host, if the broker is certain of it: 0 is the host's root. A server that grants rights to
                          * users must use this. -1 for a peer in a container, in a virtual machine or on another host, on the connecting side,
                          * and for a stream of pw_pair: such a peer has no rights of a user. */
} pw_peer;

#define PW_PEER_INIT { (uint32_t)sizeof(pw_peer), 0, NULL, NULL, 0, -1, -1, -1 }

/* ---- Texts ---- */

/* The version of the library, such as "0.1.0". */
const char *pw_version(void);

/* The text of a code. It never changes. */
const char *pw_strerror(int code);

/* The text of this thread's last failure: what failed, why, and what to do. Valid until the thread's next failure. */
const char *pw_last_error(void);

/* ---- Domains ---- */

/* Joins a domain. `name` NULL: $PARTYWALL_DOMAIN, or else the program's name and process id. `broker` NULL: $PARTYWALL_BROKER, or else the
 * default socket. Waits for the broker's answer, at most ten seconds.
 * Fails with PW_NO_BROKER, PW_DENIED, PW_REFUSED, PW_INVALID. */
int pw_join(const char *name, const char *broker, pw_domain **domain);

/* The domain's name, which the broker may have extended inside a virtual machine. Valid until pw_leave. */
const char *pw_domain_name(const pw_domain *domain);

/* Leaves the domain. Its listeners and connections continue, and keep the membership until they are closed. NULL is ignored. */
void pw_leave(pw_domain *domain);

/* ---- Streams ---- */

/* Offers a service of the domain, such as "echo". Fails with PW_IN_USE, PW_DENIED, PW_NO_BROKER, PW_INVALID. */
int pw_listen(const pw_domain *domain, const char *service, const pw_options *options, pw_listener **listener);

/* Waits for a connection. Fails with PW_EMPTY if `timeout_ms` is 0, or PW_TIMED_OUT. After a restart of the broker the listener offers its
 * service again by itself. After PW_NO_MEMORY or PW_SYSTEM, one connection is lost and the next call takes the next one. */
int pw_accept(pw_listener *listener, int timeout_ms, pw_stream **stream);

/* The descriptor that is readable when there is a connection to accept. It changes when the broker goes away and when it is back: ask
 * again after each accept. */
int pw_listener_fd(const pw_listener *listener);

/* Withdraws the service. Accepted connections stay. NULL is ignored. */
void pw_listener_close(pw_listener *listener);

/* Connects to "DOMAIN:SERVICE". Returns when the connection is in the listener's backlog, and does not wait for the accept. The caller can write
 * to it at once. Blocks until the broker has answered.
 * Fails with PW_NOT_FOUND, PW_DENIED, PW_REFUSED (for instance if the backlog is full), PW_SYSTEM (the broker is gone), PW_TIMED_OUT (the broker
 * has not answered within ten seconds), PW_NO_BROKER, PW_INVALID. */
int pw_connect(const pw_domain *domain, const char *target, const pw_options *options, pw_stream **stream);

/* Makes two streams of this process that are connected to each other, without a broker. */
int pw_pair(const pw_options *options, pw_stream **a, pw_stream **b);

/* Reads the available bytes, at most `size`, and returns how many. Waits for the first byte only. Returns 0 at the end of the stream.
 * Fails with PW_EMPTY, PW_TIMED_OUT, PW_DEAD, PW_CORRUPT. */
ptrdiff_t pw_read(pw_stream *stream, void *buffer, size_t size, int timeout_ms);

/* Writes `size` bytes and returns how many it has written. `timeout_ms` limits each wait for room, not the whole call. The count is smaller than
 * `size` if `timeout_ms` is 0, if a wait has timed out, or if the connection has ended. After the end, the next call fails with the reason.
 * If nothing was written, the call fails with PW_FULL, PW_TIMED_OUT, PW_CLOSED, PW_DEAD, PW_CORRUPT. */
ptrdiff_t pw_write(pw_stream *stream, const void *bytes, size_t size, int timeout_ms);

/* Waits until `size` contiguous bytes of this side's ring are free, and lends them to be filled in place. Only pw_commit makes them visible
 * to the peer. The span contains bytes of its earlier use. It is lent until pw_commit, pw_shutdown, pw_close or another
 * pw_reserve. pw_write and pw_write_fd fail with PW_INVALID until then.
 * A ring that is too small grows, once the broker has passed the larger ring on. With `timeout_ms` 0, pw_reserve fails with PW_FULL until then,
 * and pw_write_fd does not become readable for it: call again after a short time.
 * Fails with PW_TOO_LARGE, PW_FULL, PW_TIMED_OUT, PW_CLOSED, PW_DEAD, PW_CORRUPT, PW_NO_MEMORY. */
int pw_reserve(pw_stream *stream, size_t size, int timeout_ms, void **span);

/* Commits the first `size` bytes of the reserved span: the peer can read them now. It takes the same time for any size. `size` 0 gives
 * the span up. Fails with PW_INVALID if fewer bytes are reserved; then the span stays reserved. */
int pw_commit(pw_stream *stream, size_t size);

/* Waits for at least `at_least` bytes, stores their address in the peer's ring, and returns how many there are. They stay until
 * pw_release or pw_read takes them. There are fewer than `at_least` at the end of the stream, and where the peer continues
 * in another ring. Returns 0 at the end, and then the pointer may be NULL.
 * THE PEER CAN CHANGE THESE BYTES at any time. Copy bytes before basing a decision on them, and decide by the copy.
 * Fails with PW_EMPTY, PW_TIMED_OUT, PW_DEAD, PW_CORRUPT. */
ptrdiff_t pw_peek(pw_stream *stream, size_t at_least, int timeout_ms, const void **span);

/* Releases the first `size` bytes of the last pw_peek to the writer. Fails with PW_INVALID if that pw_peek returned fewer. */
int pw_release(pw_stream *stream, size_t size);

/* Ends one direction or both: PW_SHUT_WRITE lets the peer read the written bytes, and then the end; PW_SHUT_READ makes the peer's writes
 * fail with PW_CLOSED. The thread that uses the direction calls it. */
int pw_shutdown(pw_stream *stream, int how);

/* The descriptor that is readable when pw_read or pw_peek is worth repeating. Constant until pw_close. */
int pw_read_fd(const pw_stream *stream);

/* The descriptor that is READABLE when pw_write or pw_reserve is worth repeating. Constant until pw_close. */
int pw_write_fd(const pw_stream *stream);

/* Describes the other side. */
int pw_stream_peer(const pw_stream *stream, pw_peer *peer);

/* Stores the channel's number, as `partywall list` shows it; 0 for a stream of pw_pair. */
int pw_stream_channel(const pw_stream *stream, uint64_t *channel);

/* Closes the stream in order: the peer reads the written bytes, and then the end. NULL is ignored. */
void pw_close(pw_stream *stream);

/* ---- Messages ---- */

/* As pw_listen. A service has streams or messages, not both. */
int pw_message_listen(const pw_domain *domain, const char *service, const pw_options *options, pw_message_listener **listener);

/* As pw_accept. */
int pw_message_accept(pw_message_listener *listener, int timeout_ms, pw_message_socket **socket);

/* As pw_listener_fd. */
int pw_message_listener_fd(const pw_message_listener *listener);

/* As pw_listener_close. */
void pw_message_listener_close(pw_message_listener *listener);

/* As pw_connect. */
int pw_message_connect(const pw_domain *domain, const char *target, const pw_options *options, pw_message_socket **socket);

/* Sends one message, of any length up to pw_longest_message. The peer gets it whole and once, or not at all.
 * Fails with PW_TOO_LARGE (nothing is sent), PW_FULL, PW_TIMED_OUT, PW_CLOSED, PW_DEAD, PW_CORRUPT. */
int pw_send(pw_message_socket *socket, const void *message, size_t size, int timeout_ms);

/* Receives one message and stores its length. Fails with PW_TOO_LARGE if it is longer than `size`: then the length is stored too, and the
 * message can still be received into a larger buffer. Fails with PW_CLOSED once the peer has finished and all messages were received, and
 * with PW_EMPTY, PW_TIMED_OUT, PW_DEAD, PW_CORRUPT. */
int pw_receive(pw_message_socket *socket, void *buffer, size_t size, size_t *length, int timeout_ms);

/* The longest message that can be sent, in bytes. 0 if this side only receives. */
size_t pw_longest_message(const pw_message_socket *socket);

/* Ends the sending direction: the peer receives all sent messages, and then PW_CLOSED. */
int pw_finish(pw_message_socket *socket);

/* The descriptor that is readable when pw_receive is worth repeating. Constant until pw_message_close. */
int pw_receive_fd(const pw_message_socket *socket);

/* The descriptor that is READABLE when pw_send is worth repeating. Constant until pw_message_close.
 * While the ring grows, it is also readable from time to time, since the broker's answer comes another way. */
int pw_send_fd(const pw_message_socket *socket);

/* Describes the other side of an accepted socket. Fails with PW_INVALID on the connecting side. */
int pw_message_peer(const pw_message_socket *socket, pw_peer *peer);

/* As pw_close. */
void pw_message_close(pw_message_socket *socket);

#ifdef __cplusplus
}
#endif

#endif
