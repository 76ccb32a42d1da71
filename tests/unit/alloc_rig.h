/* Allocations that fail, one after the other: the first, second, ... of a scenario, until none is left to fail.
 *
 * Of all that is linked in: the program is linked with --wrap for each function here (Makefile, ALLOCATIONS); cJSON through its
 * hooks. To be included by one source of a program. What leaks shows under SAN=address. */
#ifndef DL_TESTS_ALLOC_RIG_H
#define DL_TESTS_ALLOC_RIG_H

#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/err.h"
#include "tests/unit/unit.h"

/* Of this thread alone: those of other threads succeed. */
static __thread bool is_armed;
static __thread long allocations_left, allocations_failed, allocations_asked;

static inline bool fails(void)
{
    bool is_due = is_armed && allocations_left-- == 0;
    allocations_asked += is_armed;
    allocations_failed += is_due;
    return is_due;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
char *__real_strndup(const char *text, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t size);
int __wrap_asprintf(char **out, const char *fmt, ...) DL_PRINTF(2, 3);
int __wrap___asprintf_chk(char **out, int flag, const char *fmt, ...) DL_PRINTF(3, 4);

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    return fails() ? NULL : __real_realloc(old, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : __real_strdup(text);
}

char *__wrap_strndup(const char *text, size_t size)
{
    return fails() ? NULL : __real_strndup(text, size);
}

int __wrap_asprintf(char **out, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int size = fails() ? -1 : vasprintf(out, fmt, args);
    va_end(args);
    return size;
}

int __wrap___asprintf_chk(char **out, int flag, const char *fmt, ...)
{
    (void)flag;
    va_list args;
    va_start(args, fmt);
    int size = fails() ? -1 : vasprintf(out, fmt, args);
    va_end(args);
    return size;
}

static inline void arm(long after)
{
    allocations_left = after;
    allocations_failed = allocations_asked = 0;
    is_armed = true;
}

/* Whether something was injected. */
static inline bool disarm(void)
{
    is_armed = false;
    return allocations_failed > 0;
}

/* What the server's side does in this thread does not count. */
#define QUIETLY(...)                                                                                                   \
    do {                                                                                                               \
        bool was_armed_ = is_armed;                                                                                    \
        is_armed = false;                                                                                              \
        __VA_ARGS__;                                                                                                   \
        is_armed = was_armed_;                                                                                         \
    } while (0)

/* Runs `scenario` with the first, second, ... allocation failing, until none is left to fail. */
#define FAIL_EACH(at_least, scenario)                                                                                  \
    do {                                                                                                               \
        cJSON_Hooks hooks_ = {__wrap_malloc, free};                                                                    \
        cJSON_InitHooks(&hooks_);                                                                                      \
        long after_ = 0;                                                                                               \
        while (scenario(after_)) {                                                                                     \
            after_++;                                                                                                  \
        }                                                                                                              \
        cJSON_InitHooks(NULL);                                                                                         \
        CU_ASSERT(after_ >= (at_least));                                                                               \
    } while (0)

#endif
