/* wire_make: the messages that tests and benches send as a syncer does, made in one place.
 *
 * Each function clears `out` and fills in what an ordinary syncer says; what a test wants otherwise it changes afterwards.
 * Bounds of a learner's run are unbounded, so that nothing waits unless a test says so. Pure. */
#ifndef DL_TESTS_WIRE_MAKE_H
#define DL_TESTS_WIRE_MAKE_H

#include <stdio.h>
#include <string.h>

#include "common/content.h"
#include "common/layout.h"
#include "common/wire.h"

static inline void make_message(struct dl_wire_message *out, enum dl_wire_type type)
{
    memset(out, 0, sizeof *out);
    out->type = type;
}

/* To learner 3, admitted first, of a balanced layout. Its fragments are those of the shard: p with p % shards == shard.
 * `versions` is by fragment. */
static inline void make_welcome(struct dl_wire_message *out, const struct dl_layout *layout, uint32_t shard,
                                uint32_t shards, const uint64_t *versions)
{
    make_message(out, DL_WIRE_WELCOME);
    struct dl_wire_welcome *welcome = &out->as.welcome;
    *welcome = (struct dl_wire_welcome){
        .learner = 3,
        .admission = 1,
        .epoch = 1,
        .shard = shard,
        .shards = shards,
        .fragments_total = layout->fragment_count,
        .layout = DL_LAYOUT_BALANCED,
        .layout_hash = layout->hash,
        .heartbeat_ms = 1000,
        .timeout_ms = 30000,
        .pull_within_steps = DL_UNBOUNDED,
        .update_within_steps = DL_UNBOUNDED,
    };
    for (uint32_t p = shard; p < layout->fragment_count; p += shards) {
        welcome->fragments[welcome->fragment_count++] =
            (struct dl_wire_fragment){.fragment = p, .version = versions[p]};
    }
}

static inline void make_refuse(struct dl_wire_message *out, uint16_t code, const char *text)
{
    make_message(out, DL_WIRE_REFUSE);
    out->as.refuse.code = code;
    snprintf(out->as.refuse.text, sizeof out->as.refuse.text, "%s", text);
}

static inline void make_pull(struct dl_wire_message *out, uint32_t p, uint64_t version, uint64_t round)
{
    make_message(out, DL_WIRE_PULL);
    out->as.pull = (struct dl_wire_pull){.round = round,
                                         .fragment = p,
                                         .version = version,
                                         .pull_within_steps = DL_UNBOUNDED,
                                         .update_within_steps = DL_UNBOUNDED};
}

static inline void make_result(struct dl_wire_message *out, uint32_t p, uint64_t round, enum dl_verdict verdict)
{
    make_message(out, DL_WIRE_RESULT);
    out->as.result = (struct dl_wire_result){.round = round, .fragment = p, .verdict = (uint8_t)verdict};
}

/* Of version and round 1 and transfer 1; `content`: its encoded bytes. NULL: the caller names a hash. */
static inline void make_update(struct dl_wire_message *out, uint32_t p, enum dl_codec codec, const uint8_t *content,
                               uint64_t bytes)
{
    make_message(out, DL_WIRE_UPDATE);
    out->as.update = (struct dl_wire_update){
        .transfer = 1,
        .fragment = p,
        .version = 1,
        .round = 1,
        .codec = (uint8_t)codec,
        .bytes = bytes,
        .content_hash = content == NULL ? 0 : dl_content_hash(content, bytes),
        .participants = 1,
    };
}

static inline void make_heartbeat(struct dl_wire_message *out, uint64_t sequence, uint64_t step, uint64_t tokens)
{
    make_message(out, DL_WIRE_HEARTBEAT);
    out->as.heartbeat = (struct dl_wire_heartbeat){.sequence = sequence, .step = step, .tokens = tokens};
}

/* Positions first .. first + count - 1. */
static inline void make_lease(struct dl_wire_message *out, uint64_t number, uint64_t first, uint32_t count)
{
    make_message(out, DL_WIRE_LEASE);
    out->as.lease = (struct dl_wire_lease){.lease = number, .first = first, .count = count};
}

static inline void make_stop(struct dl_wire_message *out, enum dl_stop_result result, const char *text)
{
    make_message(out, DL_WIRE_STOP);
    out->as.stop.result = (uint8_t)result;
    snprintf(out->as.stop.text, sizeof out->as.stop.text, "%s", text);
}

#endif
