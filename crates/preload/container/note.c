/* The stand-in for the preloaded library in containers whose C library is not glibc.
 *
 * `partywall container setup` sets LD_PRELOAD to a path with `$LIB` in it. glibc replaces `$LIB` and finds the library itself. musl does not, looks
 * for a folder with that very name, and finds this file. It needs no C library, and only reports in the container's first process that
 * connections stay on TCP. The library itself would keep a program of musl from starting.
 */

#if defined(__x86_64__)
enum { WRITE = 1, GETPID = 39 };

static long call(long number, long a, long b, long c)
{
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
enum { WRITE = 64, GETPID = 172 };

static long call(long number, long a, long b, long c)
{
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x8 __asm__("x8") = number;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x1), "r"(x2), "r"(x8) : "memory");
    return x0;
}
#else
#error "the system calls of this processor are missing here"
#endif

static const char note[] = "partywall: the C library of this container is not glibc, so its connections stay on TCP\n";

/* Every program of the container is loaded with this. One report is enough. */
__attribute__((constructor)) static void report(void)
{
    if (call(GETPID, 0, 0, 0) == 1)
        call(WRITE, 2, (long)note, sizeof(note) - 1);
}
