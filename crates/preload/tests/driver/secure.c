/* Prints whether the kernel says that this program has more rights than its caller. */
#include <stdio.h>
#include <sys/auxv.h>

int main(void) {
    printf("%lu\n", getauxval(AT_SECURE));
    return 0;
}
