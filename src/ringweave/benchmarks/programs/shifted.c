/* A wall clock that is ahead by what a file says: loaded into every process of a job by LD_PRELOAD, see chaos/clocks.py.
 *
 * RINGWEAVE_CLOCK names the file: one 64-bit count of nanoseconds, mapped once it is there. Only the wall clock is
 * shifted; the monotonic clock, sleeps and deadlines are the kernel's own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL

static const volatile int64_t *shift;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("RINGWEAVE_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED)
        shift = found;
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, which, now);
    if (failed || !shift || (which != CLOCK_REALTIME && which != CLOCK_REALTIME_COARSE))
        return (int)failed;
    int64_t nanoseconds = now->tv_sec * BILLION + now->tv_nsec + *shift;
    now->tv_sec = nanoseconds / BILLION;
    now->tv_nsec = nanoseconds % BILLION;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    if (result)
        *result = precise.tv_sec;
    return precise.tv_sec;
}
