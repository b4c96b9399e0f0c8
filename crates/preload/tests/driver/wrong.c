/* A library that is wrong on purpose, in one of several ways: what compares traces has to notice each. Built with -DFAULT=N. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define EVERY(n) (__extension__({ static int count; ++count % (n) == 0; }))

#if FAULT == 1 /* peeking takes */
ssize_t recv(int fd, void *to, size_t n, int flags) { return NEXT(recv)(fd, to, n, flags & MSG_DONTWAIT ? flags & ~MSG_PEEK : flags); }
ssize_t __recv_chk(int fd, void *to, size_t n, size_t size, int flags) { (void)size; return recv(fd, to, n, flags); }
#elif FAULT == 2 /* the number of bytes is one too small */
int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    int *n = va_arg(list, int *), r = NEXT(ioctl)(fd, request, n);
    va_end(list);
    if (request == FIONREAD && *n > 500) --*n;
    return r;
}
#elif FAULT == 3 /* flags that are not so */
ssize_t recvmsg(int fd, struct msghdr *m, int flags) {
    ssize_t r = NEXT(recvmsg)(fd, m, flags);
    if (m->msg_iovlen > 2) m->msg_flags |= MSG_TRUNC;
    return r;
}
#elif FAULT == 4 /* a wrong byte, now and then */
ssize_t readv(int fd, const struct iovec *v, int n) {
    ssize_t r = NEXT(readv)(fd, v, n);
    if (r > 100 && v->iov_len > 50) ((char *)v->iov_base)[49] ^= 1;
    return r;
}
#elif FAULT == 5 /* an edge gets lost, now and then */
int epoll_wait(int set, struct epoll_event *events, int n, int timeout) {
    int r = NEXT(epoll_wait)(set, events, n, timeout);
    return r == 1 && EVERY(7) ? 0 : r;
}
#elif FAULT == 6 /* half a close is not seen */
int poll(struct pollfd *fds, nfds_t n, int timeout) {
    int r = NEXT(poll)(fds, n, timeout);
    for (nfds_t i = 0; i < n; i++) fds[i].revents &= ~POLLRDHUP;
    return r;
}
int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t size) { (void)size; return poll(fds, n, timeout); }
#elif FAULT == 7 /* the signal does not come */
ssize_t write(int fd, const void *bytes, size_t n) {
    ssize_t r = NEXT(send)(fd, bytes, n, MSG_NOSIGNAL);
    return r < 0 && errno == ENOTSOCK ? NEXT(write)(fd, bytes, n) : r;
}
#elif FAULT == 8 /* it does not wait for all */
ssize_t recvfrom(int fd, void *to, size_t n, int flags, struct sockaddr *from, socklen_t *size) {
    return NEXT(recvfrom)(fd, to, flags & MSG_WAITALL && n > 10 ? n - 1 : n, flags, from, size);
}
ssize_t __recvfrom_chk(int fd, void *to, size_t n, size_t most, int flags, struct sockaddr *from, socklen_t *size) {
    (void)most;
    return recvfrom(fd, to, n, flags, from, size);
}
#elif FAULT == 9 /* a signal does not interrupt */
ssize_t read(int fd, void *to, size_t n) {
    ssize_t r;
    do r = NEXT(read)(fd, to, n);
    while (r < 0 && errno == EINTR);
    return r;
}
ssize_t __read_chk(int fd, void *to, size_t n, size_t size) { (void)size; return read(fd, to, n); }
#endif
