#include "worker/data/gunzip.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "common/le.h"
#include "common/mem.h"

#define GZIP_WINDOW (15 + 16) /* Largest window, gzip's frame. */
#define GZIP_TRAILER_BYTES 4  /* The last member's content size, modulo 2^32. */
#define FIRST_BYTES_MIN ((size_t)1 << 16)

bool wk_is_gzip(const uint8_t *bytes, size_t size)
{
    return size >= 3 && bytes[0] == 0x1f && bytes[1] == 0x8b && bytes[2] == 8;
}

struct unpacking {
    const char *path;
    const uint8_t *packed;
    size_t packed_size, packed_used;
    uint8_t *out;
    size_t capacity, used;
    uint64_t bytes_max;
};

/* The trailer is a hint only: a wrong one costs another allocation, never correctness. */
static size_t first_capacity(const struct unpacking *u)
{
    uint32_t hint = 0;
    if (u->packed_size > GZIP_TRAILER_BYTES) {
        hint = dl_le_u32(u->packed + u->packed_size - GZIP_TRAILER_BYTES);
    }
    /* Deflate packs at most about 1:1032, so that a larger hint is a lie. */
    uint64_t possible = (uint64_t)u->packed_size * 1040;
    /* One byte more, so that inflate sees the end of the stream without growing. */
    uint64_t wanted = DL_MAX(DL_MIN((uint64_t)hint, possible) + 1, (uint64_t)FIRST_BYTES_MIN);
    return (size_t)DL_MIN(wanted, u->bytes_max);
}

static enum dl_rc grow(struct unpacking *u, struct dl_err *err)
{
    if (u->capacity >= u->bytes_max) {
        return dl_err_set(
            err, DL_ENOMEM,
            "%s: unpacks to more than the %llu MiB that may be held in memory; unpack it on disk and name the "
            "unpacked file, which is then mapped",
            u->path, (unsigned long long)(u->bytes_max >> 20));
    }
    size_t capacity = (size_t)DL_MIN((uint64_t)u->capacity + u->capacity / 2 + FIRST_BYTES_MIN, u->bytes_max);
    uint8_t *out = realloc(u->out, capacity);
    if (out == NULL) {
        return dl_err_set(err, DL_ENOMEM, "%s: no memory to unpack it (%zu MiB so far)", u->path, u->used >> 20);
    }
    u->out = out;
    u->capacity = capacity;
    return DL_OK;
}

/* After a member: DL_AGAIN when another one follows, DL_OK at the end of the file. Some tools pad with zeros. */
static enum dl_rc look_behind(const struct unpacking *u, struct dl_err *err)
{
    const uint8_t *rest = u->packed + u->packed_used;
    size_t size = u->packed_size - u->packed_used;
    if (wk_is_gzip(rest, size)) {
        return DL_AGAIN;
    }
    for (size_t i = 0; i < size; i++) {
        if (rest[i] != 0) {
            return dl_err_set(err, DL_ECORRUPT,
                              "%s: something that is not gzip follows at byte %zu; copy the file again", u->path,
                              u->packed_used + i);
        }
    }
    return DL_OK;
}

static enum dl_rc inflate_all(struct unpacking *u, z_stream *z, struct dl_err *err)
{
    for (;;) {
        if (u->used == u->capacity) {
            enum dl_rc rc = grow(u, err);
            if (rc != DL_OK) {
                return rc;
            }
        }
        /* zlib counts in 32 bits: large files go through in pieces. */
        uInt in = (uInt)DL_MIN(u->packed_size - u->packed_used, (size_t)1 << 30);
        uInt room = (uInt)DL_MIN(u->capacity - u->used, (size_t)1 << 30);
        z->next_in = (z_const Bytef *)(uintptr_t)(u->packed + u->packed_used);
        z->avail_in = in;
        z->next_out = u->out + u->used;
        z->avail_out = room;
        int code = inflate(z, Z_NO_FLUSH);
        u->packed_used += in - z->avail_in;
        u->used += room - z->avail_out;
        if (code == Z_STREAM_END) {
            enum dl_rc rc = look_behind(u, err);
            if (rc != DL_AGAIN) {
                return rc;
            }
            if (inflateReset(z) != Z_OK) {
                return dl_err_set(err, DL_ENOMEM, "%s: cannot go on unpacking", u->path);
            }
        } else if (code == Z_MEM_ERROR) {
            return dl_err_set(err, DL_ENOMEM, "%s: no memory to unpack it", u->path);
        } else if (code != Z_OK && code != Z_BUF_ERROR) {
            return dl_err_set(err, DL_ECORRUPT, "%s: the gzip data is damaged near byte %zu (%s); copy the file again",
                              u->path, u->packed_used, z->msg == NULL ? "no detail" : z->msg);
        } else if (u->packed_used == u->packed_size && z->avail_out > 0) {
            return dl_err_set(err, DL_ECORRUPT, "%s: the gzip data ends too early, at byte %zu; copy the file again",
                              u->path, u->packed_used);
        }
    }
}

enum dl_rc wk_gunzip(const char *path, const uint8_t *packed, size_t packed_size, uint64_t bytes_max, uint8_t **out,
                     size_t *out_size, struct dl_err *err)
{
    struct unpacking u = {
        .path = path, .packed = packed, .packed_size = packed_size, .bytes_max = DL_MAX(bytes_max, 1u)};
    u.capacity = first_capacity(&u);
    u.out = malloc(u.capacity);
    z_stream z = {0};
    if (u.out == NULL || inflateInit2(&z, GZIP_WINDOW) != Z_OK) {
        free(u.out);
        return dl_err_set(err, DL_ENOMEM, "%s: no memory to unpack it (%zu MiB)", path, u.capacity >> 20);
    }
    enum dl_rc rc = inflate_all(&u, &z, err);
    inflateEnd(&z);
    if (rc != DL_OK) {
        free(u.out);
        return rc;
    }
    *out = u.out;
    *out_size = u.used;
    return DL_OK;
}
