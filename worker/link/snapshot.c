#include "worker/link/snapshot.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/codec.h"
#include "common/content.h"
#include "common/copy.h"
#include "common/mem.h"

#define SLICE_BYTES ((uint64_t)16 << 20) /* Of whole huge pages. */

static enum dl_rc plan(const struct wk_snapshot_source *source, struct wk_manifest *manifest, struct dl_err *err)
{
    const struct dl_layout *layout = source->layout;
    manifest->learner = source->learner;
    manifest->nonce = source->nonce;
    manifest->layout_hash = layout->hash;
    manifest->codec = source->codec;
    memcpy(manifest->uid, source->uid, strlen(source->uid) + 1);
    manifest->fragments = calloc(layout->fragment_count, sizeof *manifest->fragments);
    manifest->states = calloc(DL_MAX(source->state_count, 1u), sizeof *manifest->states);
    if (manifest->fragments == NULL || manifest->states == NULL) {
        return dl_err_set(err, DL_ENOMEM, "serve state: no memory for its manifest");
    }
    manifest->fragment_count = layout->fragment_count;
    manifest->state_count = source->state_count;
    for (uint32_t p = 0; p < layout->fragment_count; p++) {
        manifest->fragments[p].bytes = dl_codec_bytes(source->codec, layout->fragments[p].padded_elements);
    }
    for (uint32_t i = 0; i < source->state_count; i++) {
        memcpy(manifest->states[i].name, source->states[i].name, sizeof manifest->states[i].name);
        manifest->states[i].bytes = source->states[i].bytes;
    }
    return DL_OK;
}

/* The page faults are this thread's. */
static void populate(uint8_t *data, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes; done += SLICE_BYTES) {
        uint64_t size = DL_MIN(bytes - done, SLICE_BYTES);
        if (madvise(data + done, size, MADV_POPULATE_WRITE) != 0) {
            memset(data + done, 0, size); /* A kernel before 5.14. */
        }
    }
}

enum dl_rc wk_snapshot_new(const struct wk_snapshot_source *source, uint64_t id, struct wk_snapshot **out,
                           struct dl_err *err)
{
    struct wk_snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (snapshot == NULL) {
        return dl_err_set(err, DL_ENOMEM, "serve state: no memory");
    }
    snapshot->manifest.id = id;
    enum dl_rc rc = plan(source, &snapshot->manifest, err);
    if (rc != DL_OK) {
        wk_snapshot_free(snapshot);
        return rc;
    }
    snapshot->data_bytes = wk_manifest_total(&snapshot->manifest);
    /* Large pages make the trainer's pass over it a third shorter. */
    uint8_t *data = dl_map_large(snapshot->data_bytes);
    if (data == NULL) {
        dl_err_set(err, DL_ENOMEM, "serve state: no memory for %llu bytes", (unsigned long long)snapshot->data_bytes);
        wk_snapshot_free(snapshot);
        return err->rc;
    }
    snapshot->data = data;
    populate(data, snapshot->data_bytes);
    *out = snapshot;
    return DL_OK;
}

int64_t wk_snapshot_allowance_ns(uint64_t bytes)
{
    return (int64_t)((double)bytes / WK_PREPARE_RATE * 1e9);
}

void wk_snapshot_free(struct wk_snapshot *snapshot)
{
    if (snapshot != NULL) {
        for (uint64_t done = 0; snapshot->data != NULL && done < snapshot->data_bytes; done += SLICE_BYTES) {
            munmap(snapshot->data + done, DL_MIN(snapshot->data_bytes - done, SLICE_BYTES));
        }
        wk_manifest_release(&snapshot->manifest);
        free(snapshot->trace);
        free(snapshot->head);
        free(snapshot);
    }
}

void wk_snapshot_fill(struct wk_snapshot *snapshot, const struct wk_snapshot_source *source,
                      const struct wk_offer *offers, uint64_t step, uint8_t *trace, uint64_t trace_bytes)
{
    struct wk_manifest *manifest = &snapshot->manifest;
    uint8_t *at = snapshot->data;
    for (uint32_t p = 0; p < manifest->fragment_count; p++) {
        manifest->fragments[p].version = offers[p].version;
        manifest->fragments[p].round = offers[p].round;
        wk_store_encode_base(source->store, p, manifest->codec, at);
        at += manifest->fragments[p].bytes;
    }
    for (uint32_t i = 0; i < manifest->state_count; i++) {
        dl_copy_past(at, source->states[i].data, source->states[i].bytes);
        at += source->states[i].bytes;
    }
    manifest->step = step;
    snapshot->trace = trace;
    manifest->trace_bytes = trace == NULL ? 0 : trace_bytes;
}

enum dl_rc wk_snapshot_seal(struct wk_snapshot *snapshot, struct dl_err *err)
{
    struct wk_manifest *manifest = &snapshot->manifest;
    const uint8_t *at = snapshot->data;
    for (uint32_t p = 0; p < manifest->fragment_count; p++) {
        manifest->fragments[p].hash = dl_content_hash(at, manifest->fragments[p].bytes);
        at += manifest->fragments[p].bytes;
    }
    for (uint32_t i = 0; i < manifest->state_count; i++) {
        manifest->states[i].hash = dl_content_hash(at, manifest->states[i].bytes);
        at += manifest->states[i].bytes;
    }
    manifest->trace_hash = dl_content_hash(snapshot->trace, manifest->trace_bytes);
    return wk_manifest_encode(manifest, &snapshot->head, &snapshot->head_bytes, err);
}
