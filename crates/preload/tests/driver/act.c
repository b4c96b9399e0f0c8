/* What one side does alone, without waiting. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

unsigned char buffer[LARGEST + 64];

void fill_pattern(unsigned char *to, int side, uint64_t from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = pattern(model.episode, side, from + i);
}

long differs(const unsigned char *bytes, int side, uint64_t from, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != pattern(model.episode, side, from + i)) return (long)i;
    return -1;
}

/* Cuts `n` bytes into pieces, some of them empty. */
static int pieces(struct iovec *v, unsigned char *bytes, size_t n, unsigned bits) {
    int count = 1 + (int)(bits % 4);
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        size_t part = i + 1 == count ? n - at : (n - at) * ((bits >> (4 * i + 2)) % 8) / 8;
        v[i] = (struct iovec){bytes + at, part};
        at += part;
    }
    return count;
}

static long send_from_file(int fd, const unsigned char *bytes, size_t n) {
    int file = memfd_create("sent", MFD_CLOEXEC);
    if (file < 0 || write(file, bytes, n) != (ssize_t)n) return -1;
    off_t at = 0;
    long sent = 0, r = 0;
    while ((size_t)sent < n && (r = sendfile(fd, file, &at, n - (size_t)sent)) > 0) sent += r;
    int e = errno;
    close(file);
    errno = e;
    return r < 0 && sent == 0 ? r : sent;
}

static long send_by_splice(int fd, const unsigned char *bytes, size_t n) {
    int ends[2];
    if (n > 60000) return send(fd, bytes, n, 0);
    if (pipe2(ends, O_CLOEXEC) < 0 || write(ends[1], bytes, n) != (ssize_t)n) return -1;
    long sent = 0, r = 0;
    while ((size_t)sent < n && (r = splice(ends[0], NULL, fd, NULL, n - (size_t)sent, 0)) > 0) sent += r;
    int e = errno;
    close(ends[0]);
    close(ends[1]);
    errno = e;
    return r < 0 && sent == 0 ? r : sent;
}

static long send_in_two(int fd, const unsigned char *bytes, size_t n, int flags, bool cork) {
    int on = 1, off = 0;
    if (cork) setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on);
    size_t half = n / 2;
    long first = half ? send(fd, bytes, half, flags | (cork ? 0 : MSG_MORE)) : 0;
    long second = first == (long)half ? send(fd, bytes + half, n - half, flags) : 0;
    int e = errno;
    if (cork) setsockopt(fd, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
    errno = e;
    return first < 0 ? first : second < 0 ? (first > 0 ? first : second) : first + second;
}

long send_by(int call, int fd, const unsigned char *bytes, size_t n, int flags, unsigned bits) {
    struct iovec v[4];
    int count = pieces(v, (unsigned char *)bytes, n, bits);
    switch (call % SEND_CALLS) {
    case 0: return write(fd, bytes, n);
    case 1: return send(fd, bytes, n, flags);
    case 2: return sendto(fd, bytes, n, flags, NULL, 0);
    case 3: return writev(fd, v, count);
    case 4: return sendmsg(fd, &(struct msghdr){.msg_iov = v, .msg_iovlen = (size_t)count}, flags);
    case 5: {
        struct mmsghdr both[2] = {{.msg_hdr = {.msg_iov = v, .msg_iovlen = 1}},
                                  {.msg_hdr = {.msg_iov = v + 1, .msg_iovlen = (size_t)count - 1}}};
        int r = sendmmsg(fd, both, 2, flags);
        if (r < 0) return r;
        return (r > 0 ? both[0].msg_len : 0) + (r > 1 ? both[1].msg_len : 0);
    }
    case 6: return send_from_file(fd, bytes, n);
    case 7: return send_by_splice(fd, bytes, n);
    case 8: return send_in_two(fd, bytes, n, flags, false);
    case 9: return send_in_two(fd, bytes, n, flags, true);
    default: return syscall(SYS_sendto, fd, bytes, n, flags, NULL, 0);
    }
}

static long recv_by_splice(int fd, unsigned char *to, size_t n) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0) return -1;
    size_t got = 0;
    long r = 0;
    int e = 0;
    while (got < n) {
        /* A socket that blocks does so whatever splice's flags say: only the first splice may. */
        if (got && recv(fd, to + got, 1, MSG_PEEK | MSG_DONTWAIT) <= 0) break;
        r = splice(fd, NULL, ends[1], NULL, n - got, SPLICE_F_NONBLOCK);
        e = errno;
        if (r <= 0) break;
        for (long left = r; left > 0;) {
            long part = read(ends[0], to + got, (size_t)left);
            if (part <= 0) break;
            got += (size_t)part;
            left -= part;
        }
    }
    close(ends[0]);
    close(ends[1]);
    errno = e;
    return got || r >= 0 ? (long)got : r;
}

long recv_by(int call, int fd, unsigned char *to, size_t n, int flags, unsigned bits, char *more, size_t more_size) {
    struct iovec v[4];
    int count = pieces(v, to, n, bits);
    *more = 0;
    call %= RECV_CALLS;
    if (flags && (call == 0 || call == 3 || call == 6)) call++;
    switch (call) {
    case 0: return read(fd, to, n);
    case 1: return recv(fd, to, n, flags);
    case 2: {
        struct sockaddr_storage from;
        socklen_t size = sizeof from;
        long r = recvfrom(fd, to, n, flags, (struct sockaddr *)&from, &size);
        if (r >= 0) snprintf(more, more_size, " from=%u", size);
        return r;
    }
    case 3: return readv(fd, v, count);
    case 4: {
        char control[64], name[64];
        struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)count, .msg_name = name, .msg_namelen = sizeof name,
                           .msg_control = control, .msg_controllen = sizeof control};
        long r = recvmsg(fd, &m, flags);
        if (r >= 0) snprintf(more, more_size, " name=%u control=%zu flags=%x", m.msg_namelen, m.msg_controllen, m.msg_flags);
        return r;
    }
    case 5: {
        if (n < 2 || (flags & MSG_PEEK)) return recv(fd, to, n, flags);
        struct iovec half[2] = {{to, n / 2}, {to + n / 2, n - n / 2}};
        struct mmsghdr both[2] = {{.msg_hdr = {.msg_iov = half, .msg_iovlen = 1}},
                                  {.msg_hdr = {.msg_iov = half + 1, .msg_iovlen = 1}}};
        int r = recvmmsg(fd, both, 2, flags | MSG_WAITFORONE, NULL);
        if (r < 0) return r;
        snprintf(more, more_size, " messages=%d", r);
        /* Where more comes while this runs, the second can have some though the first is not full. */
        if (r > 1) memmove(to + both[0].msg_len, half[1].iov_base, both[1].msg_len);
        return (r > 0 ? both[0].msg_len : 0) + (r > 1 ? both[1].msg_len : 0);
    }
    case 6: return recv_by_splice(fd, to, n);
    default: return syscall(SYS_recvfrom, fd, to, n, flags, NULL, NULL);
    }
}

static void do_send(const struct step *s, int fd) {
    fill_pattern(buffer, s->side, model.e[s->side].sent, s->n);
    int before = pipe_signals;
    errno = 0;
    long r = send_by(s->call, fd, buffer, s->n, s->flags, s->bits);
    note(s, "%d by=%d n=%zu flags=%x -> %ld errno=%d pipe-signals=%d", s->slot, s->call % SEND_CALLS, s->n, (unsigned)s->flags, r,
         r < 0 ? errno : 0, pipe_signals - before);
}

static void do_recv(const struct step *s, int fd) {
    char more[100];
    memset(buffer, 0xA5, s->n + 64);
    errno = 0;
    long r = recv_by(s->call, fd, buffer, s->n, s->flags, s->bits, more, sizeof more);
    int e = errno;
    size_t written = r > 0 && !(s->flags & MSG_TRUNC) ? (size_t)r : 0;
    long wrong = differs(buffer, !s->side, model.e[s->side].got, written), beyond = 0;
    for (size_t i = written; i < s->n + 64; i++) beyond += buffer[i] != 0xA5;
    note(s, "%d by=%d n=%zu flags=%x -> %ld errno=%d wrong=%ld beyond=%ld%s", s->slot, s->call % RECV_CALLS, s->n,
         (unsigned)s->flags, r, r < 0 ? e : 0, wrong, beyond, more);
}

static int pass(int fd) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) return -1;
    union { struct cmsghdr header; char space[CMSG_SPACE(sizeof(int))]; } control;
    char byte = 'x';
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    int new = -1;
    if (sendmsg(ends[0], &m, 0) == 1 && close(fd) == 0) {
        m.msg_controllen = sizeof control;
        if (recvmsg(ends[1], &m, 0) == 1) memcpy(&new, CMSG_DATA(&control.header), sizeof new);
    }
    close(ends[0]);
    close(ends[1]);
    return new;
}

static void do_stdio(const struct step *s, int fd) {
    FILE *f = fdopen(dup(fd), s->call & 1 ? "w" : "r");
    if (!f) {
        note(s, "fdopen errno=%d", errno);
        return;
    }
    size_t done;
    long wrong = -1;
    if (s->call & 1) {
        fill_pattern(buffer, s->side, model.e[s->side].sent, s->n);
        done = fwrite(buffer, 1, s->n, f);
    } else {
        setvbuf(f, NULL, _IONBF, 0);
        done = fread(buffer, 1, s->n, f);
        wrong = differs(buffer, !s->side, model.e[s->side].got, done);
    }
    int closed = fclose(f);
    note(s, "%d %s n=%zu -> %zu wrong=%ld fclose=%d", s->slot, s->call & 1 ? "fwrite" : "fread", s->n, done, wrong, closed);
}

static int duplicate(const struct step *s, int fd) {
    int new;
    switch (s->call % 4) {
    case 0: return dup(fd);
    case 1: return fcntl(fd, F_DUPFD, 10 + (int)(s->bits % 40));
    case 2:
        new = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        fcntl(new, F_SETFD, 0);
        return new;
    default: {
        int free = open("/dev/null", O_RDONLY);
        return dup3(fd, free, 0);
    }
    }
}

void act(const struct step *s) {
    struct hands *h = &hands[s->side];
    int fd = h->fd[s->slot], r = 0, n = 0;
    errno = 0;
    switch (s->kind) {
    case SEND: do_send(s, fd); break;
    case RECV: do_recv(s, fd); break;
    case PENDING:
        r = ioctl(fd, FIONREAD, &n);
        note(s, "%d -> %d n=%d", s->slot, r, n);
        break;
    case BLOCKING: {
        int on = s->call & 1;
        if (s->call & 2) r = ioctl(fd, FIONBIO, &on);
        else r = fcntl(fd, F_SETFL, on ? O_RDWR | O_NONBLOCK : O_RDWR);
        note(s, "%d %s -> %d is=%x", s->slot, on ? "off" : "on", r, (unsigned)fcntl(fd, F_GETFL) & O_NONBLOCK);
        break;
    }
    case TIMEOUT: {
        struct timeval t = {0, model.e[s->side].timeout_ms ? 0 : TIMEOUT_MS * 1000};
        r = setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
        note(s, "%d %ld us -> %d", s->slot, (long)t.tv_usec, r);
        break;
    }
    case LOWAT:
        n = (int)s->n;
        r = setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &n, sizeof n);
        note(s, "%d %d -> %d", s->slot, n, r);
        break;
    case SHUTDOWN:
        r = shutdown(fd, s->flags);
        note(s, "%d how=%d -> %d errno=%d", s->slot, s->flags, r, r ? errno : 0);
        break;
    case DUP:
        h->fd[s->slot2] = duplicate(s, fd);
        note(s, "%d as %d by=%d %s", s->slot, s->slot2, s->call % 4, h->fd[s->slot2] < 0 ? "FAILED" : "ok");
        break;
    case DUP_ONTO:
        r = s->call & 1 && s->slot != s->slot2 ? dup3(fd, h->fd[s->slot2], 0) : dup2(fd, h->fd[s->slot2]);
        note(s, "%d onto %d -> %s", s->slot, s->slot2, r == h->fd[s->slot2] ? "ok" : "FAILED");
        break;
    case CLOSE:
        r = close(fd);
        h->fd[s->slot] = -1;
        note(s, "%d -> %d", s->slot, r);
        break;
    case LINGER: {
        struct linger l = {s->call & 1, 0};
        r = setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
        note(s, "%d %d -> %d", s->slot, l.l_onoff, r);
        break;
    }
    case LEAVE:
        for (int i = 0; i < SLOTS; i++)
            if (model.e[s->side].alive[i]) {
                r |= close(h->fd[i]);
                h->fd[i] = -1;
            }
        note(s, "-> %d", r);
        break;
    case LAST_ERROR: {
        socklen_t size = sizeof n;
        r = getsockopt(fd, SOL_SOCKET, SO_ERROR, &n, &size);
        note(s, "%d -> %d error=%d", s->slot, r, n);
        break;
    }
    case NAMES: {
        struct sockaddr_storage here, there;
        socklen_t size = sizeof here, size2 = sizeof there;
        r = getsockname(fd, (struct sockaddr *)&here, &size);
        int r2 = getpeername(fd, (struct sockaddr *)&there, &size2);
        note(s, "%d -> %d family=%d peer %d errno=%d", s->slot, r, here.ss_family, r2, r2 ? errno : 0);
        break;
    }
    case SWITCH: {
        /* Standard input is the hand on the switch, if there is one: it answers when it has been turned. */
        char c = s->call & 1 ? 'u' : 'd';
        if (send(0, &c, 1, MSG_NOSIGNAL) == 1 && read(0, &c, 1) < 0) r = -1;
        note(s, "%s", s->call & 1 ? "up" : "down");
        break;
    }
    case PASS:
        h->fd[s->slot] = pass(fd);
        note(s, "%d -> %s", s->slot, h->fd[s->slot] < 0 ? "FAILED" : "ok");
        break;
    case STDIO: do_stdio(s, fd); break;
    default: break;
    }
}
