/* What a server starts from: core, store, layout, restored fragments. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/merge/pool.h"
#include "syncer/server/internal.h"

static enum dl_rc build_layout(const struct sy_server *server, const uint8_t *tensors, size_t bytes,
                               struct dl_layout **out, struct dl_err *err)
{
    struct dl_tensor *table = NULL;
    uint32_t count = 0;
    enum dl_rc rc = dl_tensors_decode(tensors, bytes, &table, &count, err);
    if (rc != DL_OK) {
        return dl_err_wrap(err, "the tensor table");
    }
    rc = dl_layout_new(table, count, server->spec->sync.fragments, server->spec->sync.layout, out, err);
    free(table);
    return rc;
}

/* How much all pushes together may hold: by default every learner's, of every fragment, at once; not more than half of
 * the machine's memory. */
static uint64_t push_limit(const struct sy_server *server)
{
    if (server->options->push_bytes_max != 0) {
        return server->options->push_bytes_max;
    }
    uint64_t shard_bytes = 0;
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        uint64_t elements = server->layout->fragments[server->fragments[i].fragment].padded_elements;
        /* The first state comes unencoded, from one learner. */
        shard_bytes += dl_codec_bytes(server->spec->sync.compression, elements) * server->spec->learners.max +
                       dl_codec_bytes(DL_CODEC_NONE, elements);
    }
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    return DL_MIN(shard_bytes, machine / 2);
}

static enum dl_rc use_layout(struct sy_server *server, struct dl_layout *layout, struct dl_err *err)
{
    enum dl_rc rc = sy_jobs_set_layout(server->jobs, layout, err);
    if (rc != DL_OK) {
        dl_layout_free(layout);
        return rc;
    }
    dl_layout_free(server->layout);
    server->layout = layout;
    server->push_bytes_max = push_limit(server);
    dl_info("layout tensors=%u parameters=%" PRIu64 " fragments=%u largest=%" PRIu64 " hash=%016" PRIx64
            " push_bytes_max=%" PRIu64,
            layout->tensor_count, layout->elements, layout->fragment_count, layout->padded_elements_max, layout->hash,
            server->push_bytes_max);
    return DL_OK;
}

enum dl_rc sy_server_adopt_layout(struct sy_server *server, const uint8_t *tensors, size_t bytes, struct dl_err *err)
{
    struct dl_layout *layout = NULL;
    enum dl_rc rc = build_layout(server, tensors, bytes, &layout, err);
    if (rc != DL_OK) {
        return rc;
    }
    assert(layout != NULL);
    if (server->layout != NULL && server->layout->hash == layout->hash) {
        dl_layout_free(layout);
        return DL_OK;
    }
    rc = use_layout(server, layout, err);
    if (rc == DL_OK && server->store != NULL) {
        const struct sy_store_layout kept = {.kind = server->spec->sync.layout,
                                             .fragments = server->spec->sync.fragments,
                                             .hash = server->layout->hash,
                                             .tensors = tensors,
                                             .tensors_bytes = bytes};
        rc = sy_store_set_layout(server->store, &kept, err);
    }
    return rc;
}

enum dl_rc sy_server_check_layout(struct sy_server *server, const uint8_t *tensors, size_t bytes, struct dl_err *err)
{
    struct dl_layout *theirs = NULL;
    enum dl_rc rc = build_layout(server, tensors, bytes, &theirs, err);
    if (rc == DL_OK) {
        rc = dl_layout_compare(server->layout, theirs, err);
    }
    dl_layout_free(theirs);
    return rc;
}

/* --- restoring ------------------------------------------------------------------------------------------------------
 */

static enum dl_rc restore_layout(struct sy_server *server, struct dl_err *err)
{
    struct sy_store_layout kept;
    if (sy_store_get_layout(server->store, &kept) != DL_OK) {
        return DL_OK;
    }
    if (kept.fragments != server->spec->sync.fragments || kept.kind != server->spec->sync.layout) {
        return dl_err_set(err, DL_EINVAL,
                          "state folder %s was made with sync.fragments %" PRIu32
                          " and another layout than the job's %" PRIu32 ": these cannot change; use an empty folder",
                          server->options->state_dir, kept.fragments, server->spec->sync.fragments);
    }
    struct dl_layout *layout = NULL;
    enum dl_rc rc = build_layout(server, kept.tensors, kept.tensors_bytes, &layout, err);
    if (rc != DL_OK) {
        return dl_err_wrap(err, "state folder %s", server->options->state_dir);
    }
    assert(layout != NULL);
    if (layout->hash != kept.hash) {
        dl_layout_free(layout);
        return dl_err_set(err, DL_EINVAL, "state folder %s: this program cuts the same tensors into other fragments",
                          server->options->state_dir);
    }
    return use_layout(server, layout, err);
}

static enum dl_rc restore_fragments(struct sy_server *server, struct dl_err *err)
{
    uint32_t restored = 0;
    for (uint32_t i = 0; server->layout != NULL && i < server->fragment_count; i++) {
        char damage[DL_ERR_TEXT_MAX] = "";
        struct sy_blob *blob = NULL;
        enum dl_rc rc = sy_jobs_restore(server->jobs, i, &blob, damage, err);
        if (rc == DL_ENOTFOUND) {
            continue;
        }
        if (rc != DL_OK) {
            return rc;
        }
        if (damage[0] != '\0') {
            dl_error("a stored version is damaged; the one before it lives on under a new number fragment=%u "
                     "version=%" PRIu64 " damage=\"%s\"",
                     blob->fragment, blob->version, damage);
        }
        server->fragments[i].blob = blob;
        sy_core_restore_fragment(server->core, blob->fragment, blob->version, blob->round);
        restored++;
    }
    enum dl_rc rc = sy_server_restore_totals(server, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct sy_store_totals totals;
    sy_store_get_totals(server->store, &totals);
    dl_info("state restored dir=%s epoch=%" PRIu64 " fragments=%u round=%" PRIu64 " tokens=%" PRIu64,
            server->options->state_dir, server->epoch, restored, totals.rounds_merged, totals.tokens);
    return DL_OK;
}

static enum dl_rc restore_ledger(struct sy_server *server, struct dl_err *err)
{
    struct sy_ledger_state state;
    enum dl_rc rc =
        server->options->shard == 0 ? sy_store_read_ledger(server->store, server->members_max, &state, err) : DL_AGAIN;
    if (rc != DL_OK) {
        return rc == DL_AGAIN ? DL_OK : rc;
    }
    rc = sy_core_restore_ledger(server->core, &state, err);
    if (rc == DL_OK && state.positions > 0) {
        dl_info("data restored positions=%" PRIu64 " counted=%" PRIu64 " leases=%u returned_ranges=%u", state.positions,
                state.counted, state.lease_count, state.range_count);
    }
    free(state.leases);
    free(state.ranges);
    return rc;
}

static enum dl_rc open_store(struct sy_server *server, struct dl_err *err)
{
    const struct sy_server_options *options = server->options;
    if (options->state_dir == NULL || options->state_dir[0] == '\0') {
        /* No epoch on disk to count from; the clock tells learners apart which process they talk to. */
        server->epoch = (uint64_t)(dl_wall_ns() / DL_NS_PER_MS);
        dl_warn("no state folder: versions are kept in memory only, and a restart begins the job anew");
        return DL_OK;
    }
    DL_AUTO_FREE char *spec = NULL;
    enum dl_rc rc = dl_spec_to_json(server->spec, &spec, err);
    if (rc != DL_OK) {
        return rc;
    }
    const struct sy_store_options store = {.dir = options->state_dir,
                                           .job = server->spec->name,
                                           .shard = options->shard,
                                           .spec = spec,
                                           .warmup_steps = dl_warmup_steps(server->spec)};
    rc = sy_store_open(&store, &server->store, err);
    if (rc == DL_OK) {
        server->epoch = sy_store_epoch(server->store);
    }
    return rc;
}

static enum dl_rc open_tables(struct sy_server *server, struct dl_err *err)
{
    const struct dl_spec *spec = server->spec;
    for (uint32_t p = server->options->shard; p < spec->sync.fragments; p += spec->syncer.shards) {
        server->fragment_count++;
    }
    server->members_max = sy_core_members(server->core);
    server->conns_max = server->members_max + SY_CONNECTIONS_SPARE;
    server->fragments = calloc(server->fragment_count, sizeof *server->fragments);
    server->member_conns = calloc(server->members_max, sizeof(struct sy_conn *));
    server->left_by_goodbye = calloc(server->members_max, sizeof *server->left_by_goodbye);
    server->saved = calloc(server->members_max, sizeof *server->saved);
    server->encode_buffer = malloc(DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX);
    server->buffers = sy_buffers_new();
    if (server->buffers == NULL || server->fragments == NULL || server->member_conns == NULL ||
        server->left_by_goodbye == NULL || server->saved == NULL || server->encode_buffer == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory");
    }
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        server->fragments[i].fragment = server->options->shard + i * spec->syncer.shards;
    }
    return DL_OK;
}

uint32_t sy_server_threads(const struct sy_server_options *options)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return options->threads != 0 ? options->threads : (uint32_t)DL_MAX(processors, 1);
}

enum dl_rc sy_server_open_state(struct sy_server *server, struct dl_err *err)
{
    const struct sy_server_options *options = server->options;
    if (options->shard >= server->spec->syncer.shards) {
        return dl_err_set(err, DL_EINVAL, "--shard %u: the job has syncer.shards %u, so 0 to %u", options->shard,
                          server->spec->syncer.shards, server->spec->syncer.shards - 1);
    }
    if (options->shard >= server->spec->sync.fragments) {
        return dl_err_set(err, DL_EINVAL, "--shard %u: the job's %u fragments leave it none; use fewer shards",
                          options->shard, server->spec->sync.fragments);
    }
    enum dl_rc rc = open_store(server, err);
    if (rc == DL_OK) {
        const struct sy_core_config config = {.spec = server->spec, .shard = options->shard, .epoch = server->epoch};
        rc = sy_core_new(&config, &server->core, err);
    }
    if (rc == DL_OK && server->store != NULL) {
        sy_core_restore_warmup(server->core, sy_store_warmup_steps(server->store));
    }
    if (rc == DL_OK) {
        rc = open_tables(server, err);
    }
    if (rc == DL_OK) {
        const struct sy_jobs_options jobs = {.spec = server->spec,
                                             .shard = options->shard,
                                             .fragment_count = server->fragment_count,
                                             .threads = DL_MIN(sy_server_threads(options), SY_POOL_THREADS_MAX),
                                             .store = server->store,
                                             .buffers = server->buffers};
        rc = sy_jobs_new(&jobs, &server->jobs, err);
    }
    if (rc == DL_OK) {
        rc = sy_checkpoints_open(server, err);
    }
    if (rc == DL_OK && server->store != NULL) {
        rc = restore_layout(server, err);
        rc = rc == DL_OK ? restore_fragments(server, err) : rc;
        rc = rc == DL_OK ? restore_ledger(server, err) : rc;
    }
    return rc;
}

void sy_server_close_state(struct sy_server *server)
{
    for (uint32_t i = 0; server->fragments != NULL && i < server->fragment_count; i++) {
        while (server->fragments[i].pushes != NULL) {
            sy_incoming_drop(server, server->fragments[i].pushes);
        }
        sy_blob_drop(server->fragments[i].blob);
        sy_blob_drop(server->fragments[i].held);
    }
    sy_checkpoints_close(server);
    sy_buffers_free(server->buffers);
    sy_store_close(server->store);
    sy_core_free(server->core);
    dl_layout_free(server->layout);
    free(server->fragments);
    free(server->member_conns);
    free(server->left_by_goodbye);
    free(server->saved);
    free(server->encode_buffer);
    free(server->status_text);
    free(server->metrics_text);
}
