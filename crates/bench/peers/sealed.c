/* Preloaded into DPDK, whose memory without huge pages is a file that can become shorter. `partywall net` refuses such memory, so this
 * lets the file be sealed, and seals it when it has its size. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int memfd_create(const char *name, unsigned flags)
{
    return syscall(SYS_memfd_create, name, flags | MFD_ALLOW_SEALING);
}

int ftruncate64(int file, off64_t length)
{
    int result = syscall(SYS_ftruncate, file, length);
    if (result == 0)
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK);
    return result;
}
