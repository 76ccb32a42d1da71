#include "syncer/server/buffers.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "common/clock.h"
#include "common/mem.h"

#define HEAD_BYTES 64           /* Before the taker's memory: its size. */
#define PAGE_BYTES 4096         /* A page. */
#define MAPPED_BYTES (1u << 20) /* From here on a buffer is a mapping of its own. */

struct kept {
    uint8_t *memory; /* From its head. */
    int64_t since_ns;
};

struct sy_buffers {
    pthread_mutex_t lock;
    uint32_t count;
    uint64_t idle_bytes, used_bytes, used_peak;
    struct kept kept[SY_BUFFERS_KEPT_MAX];
};

static size_t size_of(const uint8_t *memory)
{
    return *(const size_t *)(const void *)memory;
}

struct sy_buffers *sy_buffers_new(void)
{
    struct sy_buffers *buffers = calloc(1, sizeof *buffers);
    if (buffers != NULL) {
        pthread_mutex_init(&buffers->lock, NULL);
    }
    return buffers;
}

void sy_buffers_free(struct sy_buffers *buffers)
{
    if (buffers == NULL) {
        return;
    }
    sy_buffers_trim(buffers, INT64_MAX);
    pthread_mutex_destroy(&buffers->lock);
    free(buffers);
}

/* What a buffer for `bytes` holds when it is made for them. */
static size_t size_for(size_t bytes)
{
    size_t unit = bytes >= DL_LARGE_BYTES ? DL_LARGE_PAGE_BYTES : bytes >= MAPPED_BYTES ? PAGE_BYTES : HEAD_BYTES;
    return (bytes + HEAD_BYTES + unit - 1) / unit * unit - HEAD_BYTES;
}

static uint8_t *drop_kept(struct sy_buffers *buffers, uint32_t i)
{
    uint8_t *memory = buffers->kept[i].memory;
    buffers->idle_bytes -= size_of(memory);
    buffers->kept[i] = buffers->kept[--buffers->count];
    return memory;
}

/* The smallest that is large enough, unless more than a quarter of it would be wasted. */
static uint8_t *take_kept(struct sy_buffers *buffers, size_t bytes)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t i = 0; i < buffers->count; i++) {
        size_t size = size_of(buffers->kept[i].memory);
        bool fits = size >= bytes && (size <= size_for(bytes) || size - bytes <= size / 4);
        if (fits && (best == UINT32_MAX || size < size_of(buffers->kept[best].memory))) {
            best = i;
        }
    }
    if (best == UINT32_MAX) {
        return NULL;
    }
    return drop_kept(buffers, best);
}

/* Mappings, since the heap does not give back what it was asked for with an alignment: once freed, such a chunk is a
 * little too small for the next one of its size, and every round would take new memory. */
static uint8_t *allocate(size_t bytes)
{
    size_t size = size_for(bytes);
    if (size < bytes) {
        return NULL;
    }
    uint8_t *memory;
    if (bytes >= DL_LARGE_BYTES) {
        memory = dl_map_large(size + HEAD_BYTES);
    } else if (size >= MAPPED_BYTES) {
        void *map = mmap(NULL, size + HEAD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = map == MAP_FAILED ? NULL : map;
    } else {
        memory = aligned_alloc(HEAD_BYTES, size + HEAD_BYTES);
    }
    if (memory != NULL) {
        *(size_t *)(void *)memory = size;
    }
    return memory;
}

static void release(uint8_t *memory)
{
    if (memory != NULL && size_of(memory) >= MAPPED_BYTES) {
        munmap(memory, size_of(memory) + HEAD_BYTES);
    } else {
        free(memory);
    }
}

/* Kept ones of other sizes go, where they and what is now in use are more than was ever in use. */
static void make_room(struct sy_buffers *buffers)
{
    while (buffers->count > 0 && buffers->used_bytes + buffers->idle_bytes > buffers->used_peak) {
        uint32_t oldest = 0;
        for (uint32_t i = 1; i < buffers->count; i++) {
            oldest = buffers->kept[i].since_ns < buffers->kept[oldest].since_ns ? i : oldest;
        }
        release(drop_kept(buffers, oldest));
    }
}

void *sy_buffers_take(struct sy_buffers *buffers, size_t bytes)
{
    pthread_mutex_lock(&buffers->lock);
    uint8_t *memory = take_kept(buffers, bytes);
    if (memory == NULL) {
        memory = allocate(bytes);
    }
    if (memory != NULL) {
        buffers->used_bytes += size_of(memory);
        buffers->used_peak = DL_MAX(buffers->used_peak, buffers->used_bytes);
        make_room(buffers);
    }
    pthread_mutex_unlock(&buffers->lock);
    return memory == NULL ? NULL : memory + HEAD_BYTES;
}

void sy_buffers_give(struct sy_buffers *buffers, void *given)
{
    if (given == NULL) {
        return;
    }
    uint8_t *memory = (uint8_t *)given - HEAD_BYTES;
    size_t size = size_of(memory);
    pthread_mutex_lock(&buffers->lock);
    buffers->used_bytes -= size;
    if (buffers->count < SY_BUFFERS_KEPT_MAX &&
        buffers->used_bytes + buffers->idle_bytes + size <= buffers->used_peak) {
        buffers->kept[buffers->count++] = (struct kept){.memory = memory, .since_ns = dl_now_ns()};
        buffers->idle_bytes += size;
        memory = NULL;
    }
    pthread_mutex_unlock(&buffers->lock);
    release(memory);
}

void sy_buffers_trim(struct sy_buffers *buffers, int64_t now_ns)
{
    pthread_mutex_lock(&buffers->lock);
    uint32_t left = 0;
    for (uint32_t i = 0; i < buffers->count; i++) {
        if (now_ns - buffers->kept[i].since_ns < SY_BUFFERS_IDLE_NS) {
            buffers->kept[left++] = buffers->kept[i];
        } else {
            buffers->idle_bytes -= size_of(buffers->kept[i].memory);
            release(buffers->kept[i].memory);
        }
    }
    buffers->count = left;
    pthread_mutex_unlock(&buffers->lock);
}

uint64_t sy_buffers_idle_bytes(struct sy_buffers *buffers)
{
    pthread_mutex_lock(&buffers->lock);
    uint64_t bytes = buffers->idle_bytes;
    pthread_mutex_unlock(&buffers->lock);
    return bytes;
}
