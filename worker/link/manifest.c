#include "worker/link/manifest.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"

#define VERSION 2
#define FRAGMENT_BYTES 32
#define STATE_BYTES_MIN 19 /* A name of one character. */
#define PART_BYTES_MAX (DL_TENSOR_ELEMENTS_MAX * sizeof(float))

void wk_manifest_release(struct wk_manifest *manifest)
{
    free(dl_take(manifest->fragments));
    free(dl_take(manifest->states));
    manifest->fragment_count = manifest->state_count = 0;
}

uint64_t wk_manifest_fragment_offset(const struct wk_manifest *manifest, uint32_t fragment)
{
    uint64_t offset = 0;
    for (uint32_t p = 0; p < fragment; p++) {
        offset += manifest->fragments[p].bytes;
    }
    return offset;
}

uint64_t wk_manifest_states_offset(const struct wk_manifest *manifest)
{
    return wk_manifest_fragment_offset(manifest, manifest->fragment_count);
}

uint64_t wk_manifest_total(const struct wk_manifest *manifest)
{
    uint64_t total = wk_manifest_states_offset(manifest);
    for (uint32_t i = 0; i < manifest->state_count; i++) {
        total += manifest->states[i].bytes;
    }
    return total + manifest->trace_bytes;
}

/* --- encoding ---------------------------------------------------------------------------------------------------- */

struct writer {
    uint8_t *at;
};

static void put(struct writer *writer, uint64_t value, unsigned bytes)
{
    dl_le_put(writer->at, value, bytes);
    writer->at += bytes;
}

static void put_text(struct writer *writer, const char *text)
{
    size_t length = strlen(text);
    put(writer, length, 2);
    memcpy(writer->at, text, length);
    writer->at += length;
}

static uint64_t checksum(const uint8_t *bytes, size_t payload)
{
    return dl_hash64(bytes + WK_MANIFEST_HEADER_BYTES, payload, dl_hash64(bytes, 16, 0));
}

enum dl_rc wk_manifest_encode(const struct wk_manifest *manifest, uint8_t **out, size_t *size, struct dl_err *err)
{
    size_t payload = 8 + 4 + 8 + 8 + 8 + 1 + 2 + strlen(manifest->uid) + 4 +
                     (size_t)manifest->fragment_count * FRAGMENT_BYTES + 4 + 16;
    for (uint32_t i = 0; i < manifest->state_count; i++) {
        payload += 2 + strlen(manifest->states[i].name) + 16;
    }
    if (payload > WK_MANIFEST_BYTES_MAX - WK_MANIFEST_HEADER_BYTES) {
        return dl_err_set(err, DL_EINVAL, "manifest: %zu bytes are too many", payload);
    }
    uint8_t *bytes = calloc(1, WK_MANIFEST_HEADER_BYTES + payload);
    if (bytes == NULL) {
        return dl_err_set(err, DL_ENOMEM, "manifest: no memory for %zu bytes", payload);
    }
    memcpy(bytes, "DLS1", 4);
    bytes[4] = VERSION;
    struct writer writer = {.at = bytes + 8};
    put(&writer, payload, 4);
    writer.at = bytes + WK_MANIFEST_HEADER_BYTES;
    put(&writer, manifest->id, 8);
    put(&writer, manifest->learner, 4);
    put(&writer, manifest->nonce, 8);
    put(&writer, manifest->step, 8);
    put(&writer, manifest->layout_hash, 8);
    put(&writer, manifest->codec, 1);
    put_text(&writer, manifest->uid);
    put(&writer, manifest->fragment_count, 4);
    for (uint32_t p = 0; p < manifest->fragment_count; p++) {
        const struct wk_manifest_fragment *fragment = &manifest->fragments[p];
        put(&writer, fragment->version, 8);
        put(&writer, fragment->round, 8);
        put(&writer, fragment->bytes, 8);
        put(&writer, fragment->hash, 8);
    }
    put(&writer, manifest->state_count, 4);
    for (uint32_t i = 0; i < manifest->state_count; i++) {
        put_text(&writer, manifest->states[i].name);
        put(&writer, manifest->states[i].bytes, 8);
        put(&writer, manifest->states[i].hash, 8);
    }
    put(&writer, manifest->trace_bytes, 8);
    put(&writer, manifest->trace_hash, 8);
    assert(writer.at == bytes + WK_MANIFEST_HEADER_BYTES + payload);
    writer.at = bytes + 16;
    put(&writer, checksum(bytes, payload), 8);
    *out = bytes;
    *size = WK_MANIFEST_HEADER_BYTES + payload;
    return DL_OK;
}

/* --- decoding ---------------------------------------------------------------------------------------------------- */

struct reader { /* `cut`: something was longer than what is there, or than it may be. */
    const uint8_t *at;
    size_t left;
    bool cut;
};

static uint64_t get(struct reader *reader, unsigned bytes)
{
    if (reader->left < bytes) {
        reader->cut = true;
        reader->left = 0;
        return 0;
    }
    uint64_t value = dl_le_get(reader->at, bytes);
    reader->at += bytes;
    reader->left -= bytes;
    return value;
}

static void get_text(struct reader *reader, char *out, size_t capacity)
{
    size_t length = get(reader, 2);
    bool fine = !reader->cut && length > 0 && length < capacity && length <= reader->left;
    for (size_t i = 0; fine && i < length; i++) {
        fine = reader->at[i] >= 0x20 && reader->at[i] != 0x7f;
    }
    if (!fine) {
        reader->cut = true;
        out[0] = 0;
        return;
    }
    memcpy(out, reader->at, length);
    out[length] = 0;
    reader->at += length;
    reader->left -= length;
}

static enum dl_rc broken(struct dl_err *err, const char *what)
{
    return dl_err_set(err, DL_EPROTO, "a peer's manifest: %s", what);
}

static enum dl_rc check_header(const uint8_t *bytes, size_t size, struct dl_err *err)
{
    if (size < WK_MANIFEST_HEADER_BYTES || size > WK_MANIFEST_BYTES_MAX || memcmp(bytes, "DLS1", 4) != 0) {
        return broken(err, "it is none");
    }
    if (bytes[4] != VERSION) {
        return dl_err_set(err, DL_EUNSUPPORTED, "a peer's manifest is of version %u, this learner reads %d", bytes[4],
                          VERSION);
    }
    struct reader reader = {.at = bytes + 5, .left = WK_MANIFEST_HEADER_BYTES - 5};
    uint64_t zero = get(&reader, 3), payload = get(&reader, 4);
    zero |= get(&reader, 4);
    uint64_t sum = get(&reader, 8);
    if (zero != 0 || payload != size - WK_MANIFEST_HEADER_BYTES) {
        return broken(err, "its size is not what it says");
    }
    return sum == checksum(bytes, payload) ? DL_OK : dl_err_set(err, DL_ECORRUPT, "a peer's manifest was damaged");
}

static bool take_fragments(struct reader *reader, struct wk_manifest *out)
{
    uint64_t count = get(reader, 4);
    if (count == 0 || count > DL_SPEC_FRAGMENTS_MAX || count > reader->left / FRAGMENT_BYTES) {
        return false;
    }
    out->fragments = calloc(count, sizeof *out->fragments);
    out->fragment_count = out->fragments == NULL ? 0 : (uint32_t)count;
    for (uint32_t p = 0; p < out->fragment_count; p++) {
        struct wk_manifest_fragment *fragment = &out->fragments[p];
        fragment->version = get(reader, 8);
        fragment->round = get(reader, 8);
        fragment->bytes = get(reader, 8);
        fragment->hash = get(reader, 8);
        bool fine = fragment->version <= INT64_MAX / 2 && fragment->round <= INT64_MAX / 2 && fragment->bytes > 0 &&
                    fragment->bytes <= PART_BYTES_MAX;
        if (!fine) {
            return false;
        }
    }
    return true;
}

static bool take_states(struct reader *reader, struct wk_manifest *out)
{
    uint64_t count = get(reader, 4);
    if (reader->cut || count > WK_STATES_MAX || count > reader->left / STATE_BYTES_MIN) {
        return false;
    }
    out->states = calloc(count == 0 ? 1 : count, sizeof *out->states);
    out->state_count = out->states == NULL ? 0 : (uint32_t)count;
    for (uint32_t i = 0; i < out->state_count; i++) {
        struct wk_manifest_state *state = &out->states[i];
        get_text(reader, state->name, sizeof state->name);
        state->bytes = get(reader, 8);
        state->hash = get(reader, 8);
        if (reader->cut || state->bytes == 0 || state->bytes > PART_BYTES_MAX) {
            return false;
        }
    }
    return true;
}

enum dl_rc wk_manifest_decode(const uint8_t *bytes, size_t size, struct wk_manifest *out, struct dl_err *err)
{
    enum dl_rc rc = check_header(bytes, size, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct reader reader = {.at = bytes + WK_MANIFEST_HEADER_BYTES, .left = size - WK_MANIFEST_HEADER_BYTES};
    struct wk_manifest got = {.id = get(&reader, 8)};
    got.learner = (uint32_t)get(&reader, 4);
    got.nonce = get(&reader, 8);
    got.step = get(&reader, 8);
    got.layout_hash = get(&reader, 8);
    unsigned codec = (unsigned)get(&reader, 1);
    got.codec = (enum dl_codec)codec;
    get_text(&reader, got.uid, sizeof got.uid);
    bool fine = !reader.cut && codec <= DL_CODEC_BF16 && got.learner < DL_SPEC_LEARNERS_MAX &&
                got.step <= INT64_MAX / 2 && take_fragments(&reader, &got);
    fine = fine && (got.fragments == NULL || take_states(&reader, &got));
    if (fine && (got.fragments == NULL || got.states == NULL)) {
        rc = dl_err_set(err, DL_ENOMEM, "a peer's manifest: no memory");
    } else {
        got.trace_bytes = get(&reader, 8);
        got.trace_hash = get(&reader, 8);
        fine = fine && !reader.cut && reader.left == 0 && got.trace_bytes <= WK_TRACE_BYTES_MAX;
        rc = fine ? DL_OK : broken(err, "cut off, or a value out of range");
    }
    if (rc != DL_OK) {
        wk_manifest_release(&got);
        return rc;
    }
    *out = got;
    return DL_OK;
}
