#include "worker/data/dictzip.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "common/le.h"
#include "common/mem.h"

/* RFC 1952; the subfield "RA" of the extra field is dictzip's table of chunks. */
#define FIXED_BYTES 12 /* With the extra field's length. */
#define TRAILER_BYTES 8
#define FLAG_HEADER_CRC 2u
#define FLAG_EXTRA 4u
#define FLAG_NAME 8u
#define FLAG_COMMENT 16u
#define TABLE_BYTES 6      /* Version, bytes a chunk, number of chunks; then two bytes a chunk. */
#define LAST_BLOCK_MAX 64u /* Of deflate, behind the chunks: an empty one. */

struct dictzip {
    const uint8_t *packed, *sizes; /* `sizes`: 16 bits a chunk, packed. */
    size_t packed_size, data;      /* Where the first chunk begins. */
    uint32_t chunk_bytes, chunks;
    uint8_t *out;
    size_t total;
    uLong *checksums; /* By chunk. */
    size_t *starts;   /* By chunk, in `packed`. */
    atomic_uint next;
    atomic_bool failed;
};

static uint32_t read_u16(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

/* The table of chunks in the extra field of `size` bytes. */
static bool find_table(struct dictzip *d, const uint8_t *extra, size_t size)
{
    while (size >= 4) {
        size_t length = read_u16(extra + 2);
        if (length > size - 4) {
            return false;
        }
        if (extra[0] == 'R' && extra[1] == 'A') {
            const uint8_t *table = extra + 4;
            if (length < TABLE_BYTES || read_u16(table) != 1) {
                return false;
            }
            d->chunk_bytes = read_u16(table + 2);
            d->chunks = read_u16(table + 4);
            d->sizes = table + TABLE_BYTES;
            return d->chunk_bytes > 0 && d->chunks > 0 && length == TABLE_BYTES + 2 * (size_t)d->chunks;
        }
        extra += 4 + length;
        size -= 4 + length;
    }
    return false;
}

static bool skip_text(const struct dictzip *d, size_t *at)
{
    const uint8_t *end = memchr(d->packed + *at, 0, d->packed_size - *at);
    *at = end == NULL ? d->packed_size : (size_t)(end - d->packed) + 1;
    return end != NULL;
}

static bool read_header(struct dictzip *d)
{
    if (d->packed_size < FIXED_BYTES + TRAILER_BYTES || d->packed[0] != 0x1f || d->packed[1] != 0x8b ||
        d->packed[2] != 8 || (d->packed[3] & FLAG_EXTRA) == 0) {
        return false;
    }
    uint32_t flags = d->packed[3];
    size_t extra_bytes = read_u16(d->packed + FIXED_BYTES - 2);
    if (extra_bytes > d->packed_size - FIXED_BYTES || !find_table(d, d->packed + FIXED_BYTES, extra_bytes)) {
        return false;
    }
    size_t at = FIXED_BYTES + extra_bytes;
    if (((flags & FLAG_NAME) != 0 && !skip_text(d, &at)) || ((flags & FLAG_COMMENT) != 0 && !skip_text(d, &at))) {
        return false;
    }
    d->data = at + ((flags & FLAG_HEADER_CRC) != 0 ? 2 : 0);
    return true;
}

/* Where each chunk is, and that they, one last block and the trailer are all there is. */
static bool place_chunks(struct dictzip *d, uint64_t bytes_max)
{
    uint64_t at = d->data;
    for (uint32_t i = 0; i < d->chunks; i++) {
        d->starts[i] = (size_t)at;
        at += read_u16(d->sizes + 2 * (size_t)i);
    }
    uint64_t end = d->packed_size - TRAILER_BYTES;
    d->total = dl_le_u32(d->packed + end + 4);
    uint64_t most = (uint64_t)d->chunks * d->chunk_bytes;
    return at <= end && end - at <= LAST_BLOCK_MAX && d->total <= bytes_max && d->total <= most &&
           d->total > most - d->chunk_bytes;
}

static bool unpack_chunk(struct dictzip *d, z_stream *z, uint32_t chunk)
{
    size_t from = (size_t)chunk * d->chunk_bytes;
    uInt wanted = (uInt)DL_MIN((size_t)d->chunk_bytes, d->total - from);
    if (inflateReset(z) != Z_OK) {
        return false;
    }
    z->next_in = (z_const Bytef *)(uintptr_t)(d->packed + d->starts[chunk]);
    z->avail_in = (uInt)read_u16(d->sizes + 2 * (size_t)chunk);
    z->next_out = d->out + from;
    z->avail_out = wanted;
    int code = inflate(z, Z_SYNC_FLUSH);
    d->checksums[chunk] = crc32(0, d->out + from, wanted);
    return (code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR) && z->avail_out == 0;
}

static void *work(void *context)
{
    struct dictzip *d = context;
    z_stream z = {0};
    if (inflateInit2(&z, -MAX_WBITS) != Z_OK) {
        atomic_store(&d->failed, true);
        return NULL;
    }
    uint32_t chunk;
    while (!atomic_load(&d->failed) && (chunk = atomic_fetch_add(&d->next, 1)) < d->chunks) {
        if (!unpack_chunk(d, &z, chunk)) {
            atomic_store(&d->failed, true);
        }
    }
    inflateEnd(&z);
    return NULL;
}

/* This thread works, too: it is enough when no other can be started. */
static void work_together(struct dictzip *d)
{
    pthread_t threads[WK_DICTZIP_THREADS_MAX - 1];
    uint32_t started = 0;
    sigset_t all, before;
    sigfillset(&all); /* Signals are for the thread that has always been there. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < DL_COUNT_OF(threads) && started + 1 < d->chunks &&
           pthread_create(&threads[started], NULL, work, d) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(d);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
}

static bool is_intact(const struct dictzip *d)
{
    uLong checksum = 0;
    for (uint32_t i = 0; i < d->chunks; i++) {
        size_t from = (size_t)i * d->chunk_bytes;
        size_t bytes = DL_MIN((size_t)d->chunk_bytes, d->total - from);
        checksum = crc32_combine(checksum, d->checksums[i], (z_off_t)bytes);
    }
    return checksum == dl_le_u32(d->packed + d->packed_size - TRAILER_BYTES);
}

bool wk_dictzip_unpack(const uint8_t *packed, size_t packed_size, uint64_t bytes_max, uint8_t **out, size_t *out_size)
{
    struct dictzip d = {.packed = packed, .packed_size = packed_size};
    if (!read_header(&d)) {
        return false;
    }
    DL_AUTO_FREE uLong *checksums = calloc(d.chunks, sizeof *checksums);
    DL_AUTO_FREE size_t *starts = calloc(d.chunks, sizeof *starts);
    d.checksums = checksums;
    d.starts = starts;
    if (checksums == NULL || starts == NULL || !place_chunks(&d, bytes_max)) {
        return false;
    }
    DL_AUTO_FREE uint8_t *content = malloc(d.total);
    d.out = content;
    if (content == NULL) {
        return false;
    }
    work_together(&d);
    if (atomic_load(&d.failed) || !is_intact(&d)) {
        return false;
    }
    *out_size = d.total;
    *out = dl_take(content);
    return true;
}
