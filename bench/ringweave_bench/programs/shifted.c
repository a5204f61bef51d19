/* A wall clock that is ahead by what a file says: loaded into every process of a job by LD_PRELOAD, see chaos/clocks.py.
 *
 * RINGWEAVE_CLOCK names the file: one 64-bit count of nanoseconds, mapped once it is there. Only the wall clock is
 * shifted; the monotonic clock and sleeps are the kernel's own. Who waits until a moment of the wall clock has read that
 * moment off the shifted one, so it is turned back for the kernel: C++ libraries that were built for a C library older
 * than 2.30 wait like that, Gloo for one, and a wait of a millisecond would last as long as the clock is ahead.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL
#define LEAST_WALL_S BILLION /* Of the year 2001; no machine has run for so long, so a moment after it is no uptime. */

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

/* Also of the end of time, which some wait for: it is not counted in nanoseconds. */
static struct timespec later(struct timespec moment, int64_t nanoseconds) {
    int64_t rest = moment.tv_nsec + nanoseconds % BILLION; /* from -BILLION to 2 BILLION */
    int64_t carry = rest < 0 ? -1 : rest / BILLION;
    return (struct timespec){.tv_sec = moment.tv_sec + nanoseconds / BILLION + carry, .tv_nsec = rest - carry * BILLION};
}

static struct timespec kernels(const struct timespec *until) {
    return shift ? later(*until, -*shift) : *until;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && shift && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        *now = later(*now, *shift);
    return (int)failed;
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

/* Which clock a condition goes by, only it knows: the moment tells. */
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    if (until->tv_sec < LEAST_WALL_S)
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    struct timespec moment = kernels(until);
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec moment = kernels(until);
    return sem_clockwait(semaphore, CLOCK_REALTIME, &moment);
}
