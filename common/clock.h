/* Time for shells: cores get time as an argument and never include this. Any thread. */
#ifndef DL_COMMON_CLOCK_H
#define DL_COMMON_CLOCK_H

#include <stdint.h>
#include <time.h>

#define DL_NS_PER_SECOND INT64_C(1000000000)
#define DL_NS_PER_MS INT64_C(1000000)

/* Nanoseconds that only grow, unaffected by clock steps. */
static inline int64_t dl_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * DL_NS_PER_SECOND + now.tv_nsec;
}

/* Nanoseconds since 1970, for people and files only. */
static inline int64_t dl_wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * DL_NS_PER_SECOND + now.tv_nsec;
}

#endif
