/* Ownership helpers: the scope owns, handing over is visible.
 *
 *     DL_AUTO_FREE char *path = dl_strdup(...);   released at the end of the scope
 *     return dl_take(path);                       handed to the caller
 *
 * Pure, any layer. */
#ifndef DL_COMMON_MEM_H
#define DL_COMMON_MEM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static inline void dl_cleanup_free(void *pointer)
{
    free(*(void **)pointer);
}

static inline void dl_cleanup_fd(const int *fd)
{
    if (*fd >= 0) {
        close(*fd);
    }
}

static inline void dl_cleanup_file(FILE **file)
{
    if (*file != NULL) {
        fclose(*file);
    }
}

#define DL_AUTO_FREE __attribute__((cleanup(dl_cleanup_free)))
#define DL_AUTO_FD __attribute__((cleanup(dl_cleanup_fd)))
#define DL_AUTO_FILE __attribute__((cleanup(dl_cleanup_file)))

/* Hands the pointer over: the variable becomes NULL, so that its cleanup does nothing. */
#define dl_take(pointer)                                                                                               \
    ({                                                                                                                 \
        __typeof__(pointer) taken_ = (pointer);                                                                        \
        (pointer) = NULL;                                                                                              \
        taken_;                                                                                                        \
    })

#define DL_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define DL_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DL_MAX(a, b) ((a) > (b) ? (a) : (b))

#define DL_LARGE_PAGE_BYTES ((size_t)2 << 20)
#define DL_LARGE_BYTES ((size_t)16 << 20) /* From here on large pages are asked for. */

/* Asks for large pages in memory that begins at one, and for whole ones only. A wish: without them everything works, slower. */
static inline void dl_want_large_pages(void *memory, size_t bytes)
{
    (void)madvise(memory, bytes / DL_LARGE_PAGE_BYTES * DL_LARGE_PAGE_BYTES, MADV_HUGEPAGE);
}

/* Memory for arrays that are walked from end to end: aligned to 64 bytes, from 2 MiB on to a large page, in large pages where the
 * system lends them. Content undefined; free() releases it. NULL when there is none. */
static inline void *dl_alloc_large(size_t bytes)
{
    size_t alignment = bytes >= DL_LARGE_PAGE_BYTES ? DL_LARGE_PAGE_BYTES : 64;
    size_t rounded = (bytes + 63) & ~(size_t)63;
    void *memory = NULL;
    if (rounded < bytes || posix_memalign(&memory, alignment, rounded == 0 ? 64 : rounded) != 0) {
        return NULL;
    }
    if (bytes >= DL_LARGE_PAGE_BYTES) {
        dl_want_large_pages(memory, bytes);
    }
    return memory;
}

/* The same, but zeroed, of any size on a large page, and a mapping of its own: munmap(memory, bytes) releases it, and the system
 * has it back at once. */
static inline void *dl_map_large(size_t bytes)
{
    const size_t page = 4096, rounded = (bytes + page - 1) / page * page, all_bytes = rounded + DL_LARGE_PAGE_BYTES;
    if (bytes == 0 || all_bytes < bytes) {
        return NULL;
    }
    uint8_t *all = (uint8_t *)mmap(NULL, all_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == (uint8_t *)MAP_FAILED) {
        return NULL;
    }
    size_t before = (DL_LARGE_PAGE_BYTES - (uintptr_t)all % DL_LARGE_PAGE_BYTES) % DL_LARGE_PAGE_BYTES;
    if (before > 0) {
        munmap(all, before);
    }
    munmap(all + before + rounded, DL_LARGE_PAGE_BYTES - before); /* What lies after goes back, too. */
    dl_want_large_pages(all + before, bytes);
    return all + before;
}

/* Memory aligned to 64 bytes (a cache line, an AVX-512 register), from 1 MiB on to pages, so that a disk can take it as it
 * is, from DL_LARGE_BYTES on to large ones; zeroed; free() releases it. NULL when there is none. */
static inline void *dl_alloc_aligned(size_t bytes)
{
    size_t alignment = bytes >= DL_LARGE_BYTES ? DL_LARGE_PAGE_BYTES : bytes >= (size_t)1 << 20 ? 4096 : 64;
    size_t rounded = bytes == 0 ? 64 : (bytes + alignment - 1) & ~(alignment - 1);
    void *memory = NULL;
    if (rounded >= bytes) {
        memory = bytes >= DL_LARGE_BYTES ? dl_alloc_large(rounded) : aligned_alloc(alignment, rounded);
    }
    if (memory != NULL) {
        __builtin_memset(memory, 0, rounded);
    }
    return memory;
}

#endif
