#include "common/wire_table.h"

#include <assert.h>

#include "common/layout.h"
#include "common/mem.h"

#define BYTES_MAX (DL_TENSOR_ELEMENTS_MAX * sizeof(float))
#define MILLISECONDS_MAX (24u * 3600 * 1000)

#define AT(message, member) ((uint32_t)offsetof(struct dl_wire_message, as.message.member))
#define SIZE(message, member) ((uint32_t)sizeof(((struct dl_wire_message *)0)->as.message.member))

/* One line a macro reads as the table it is. */
/* clang-format off */
#define U8(m, f, least, most) {#f, DL_WIRE_KIND_U8, AT(m, f), 0, least, most}
#define U16(m, f, least, most) {#f, DL_WIRE_KIND_U16, AT(m, f), 0, least, most}
#define U32(m, f, least, most) {#f, DL_WIRE_KIND_U32, AT(m, f), 0, least, most}
#define I32(m, f, least, most) {#f, DL_WIRE_KIND_I32, AT(m, f), 0, least, most}
#define U64(m, f, least, most) {#f, DL_WIRE_KIND_U64, AT(m, f), 0, least, most}
#define COUNTER(m, f) {#f, DL_WIRE_KIND_U64, AT(m, f), 0, 0, DL_WIRE_COUNTER_MAX}
#define F32(m, f, most) {#f, DL_WIRE_KIND_F32, AT(m, f), 0, 0, most}
#define F64(m, f) {#f, DL_WIRE_KIND_F64, AT(m, f), 0, 0, 0}
#define NAME(m, f) {#f, DL_WIRE_KIND_NAME, AT(m, f), SIZE(m, f), 0, 0}
#define TEXT(m, f) {#f, DL_WIRE_KIND_TEXT, AT(m, f), SIZE(m, f), 0, 0}
#define FRAGMENTS(m) \
    {"fragments", DL_WIRE_KIND_FRAGMENTS, AT(m, fragments), AT(m, fragment_count), 0, DL_SPEC_FRAGMENTS_MAX}
#define TENSORS(m, most) {"tensors", DL_WIRE_KIND_TENSORS, AT(m, tensors), AT(m, tensors_bytes), 0, most}
#define TRACE(m) {"entries", DL_WIRE_KIND_TRACE, AT(m, entries), AT(m, count), 0, DL_WIRE_TRACE_MAX}
#define FRAGMENT(m) U32(m, fragment, 0, DL_SPEC_FRAGMENTS_MAX - 1)
#define CONTROL(name, fields) {name, fields, DL_COUNT_OF(fields), DL_WIRE_CONTROL_PAYLOAD_MAX}
/* clang-format on */

static const struct dl_wire_field hello_fields[] = {
    U8(hello, role, 0, DL_ROLE_EVALUATOR),
    I32(hello, learner, -1, DL_SPEC_LEARNERS_MAX - 1),
    U64(hello, nonce, 0, UINT64_MAX),
    NAME(hello, uid),
    NAME(hello, job),
    TEXT(hello, trainer),
    U32(hello, shard, 0, DL_SPEC_SHARDS_MAX - 1),
    COUNTER(hello, step),
    COUNTER(hello, tokens),
    U8(hello, recover, 0, 1),
    TEXT(hello, serve),
    FRAGMENTS(hello),
    TENSORS(hello, DL_WIRE_HELLO_PAYLOAD_MAX),
};

static const struct dl_wire_field welcome_fields[] = {
    U32(welcome, learner, 0, DL_SPEC_LEARNERS_MAX - 1),
    COUNTER(welcome, admission),
    U64(welcome, epoch, 0, UINT64_MAX),
    U32(welcome, shard, 0, DL_SPEC_SHARDS_MAX - 1),
    U32(welcome, shards, 1, DL_SPEC_SHARDS_MAX),
    U32(welcome, fragments_total, 1, DL_SPEC_FRAGMENTS_MAX),
    U8(welcome, layout, 0, DL_LAYOUT_TENSOR),
    U64(welcome, layout_hash, 0, UINT64_MAX),
    U8(welcome, compression, 0, DL_CODEC_INT4),
    U8(welcome, broadcast_compression, 0, DL_CODEC_BF16),
    U8(welcome, apply, 0, DL_APPLY_REBASE),
    F32(welcome, apply_alpha, 1),
    U32(welcome, heartbeat_ms, 1, MILLISECONDS_MAX),
    U32(welcome, timeout_ms, 1, MILLISECONDS_MAX),
    COUNTER(welcome, step),
    COUNTER(welcome, tokens),
    COUNTER(welcome, token_budget),
    U32(welcome, learners, 0, DL_SPEC_LEARNERS_MAX),
    U32(welcome, pull_within_steps, 0, DL_UNBOUNDED),
    U32(welcome, update_within_steps, 0, DL_UNBOUNDED),
    U32(welcome, wait_ms, 0, UINT32_MAX),
    COUNTER(welcome, trace_acked),
    FRAGMENTS(welcome),
};

static const struct dl_wire_field refuse_fields[] = {
    U16(refuse, code, DL_REFUSE_VERSION, DL_REFUSE_MALFORMED),
    TEXT(refuse, text),
};

static const struct dl_wire_field meta_fields[] = {
    COUNTER(meta, step),    COUNTER(meta, tokens),    F32(meta, loss, 0), COUNTER(meta, step_ns),
    COUNTER(meta, busy_ns), COUNTER(meta, waited_ns), FRAGMENTS(meta),
};

static const struct dl_wire_field pull_fields[] = {
    COUNTER(pull, round),
    FRAGMENT(pull),
    COUNTER(pull, version),
    U32(pull, flags, 0, DL_PULL_SEED | DL_PULL_WARMUP | DL_PULL_FINAL | DL_PULL_MISSED),
    U32(pull, pull_within_steps, 0, DL_UNBOUNDED),
    U32(pull, update_within_steps, 0, DL_UNBOUNDED),
    U32(pull, wait_ms, 0, UINT32_MAX),
    COUNTER(pull, trace_acked),
};

static const struct dl_wire_field push_fields[] = {
    U64(push, transfer, 0, UINT64_MAX),
    COUNTER(push, round),
    FRAGMENT(push),
    COUNTER(push, base_version),
    COUNTER(push, step),
    U32(push, steps, 0, UINT32_MAX),
    COUNTER(push, tokens),
    U8(push, codec, 0, DL_CODEC_INT4),
    U64(push, bytes, 1, BYTES_MAX),
    COUNTER(push, trace),
    COUNTER(push, lease),
    COUNTER(push, cursor),
};

static const struct dl_wire_field push_none_fields[] = {
    COUNTER(push_none, round),
    FRAGMENT(push_none),
    U8(push_none, reason, 0, DL_VERDICT_COUNT - 1),
};

static const struct dl_wire_field result_fields[] = {
    COUNTER(result, round),
    FRAGMENT(result),
    U8(result, verdict, 0, DL_VERDICT_COUNT - 1),
};

static const struct dl_wire_field update_fields[] = {
    U64(update, transfer, 0, UINT64_MAX),         FRAGMENT(update),
    U64(update, version, 1, DL_WIRE_COUNTER_MAX), COUNTER(update, round),
    U8(update, codec, 0, DL_CODEC_BF16),          U64(update, bytes, 1, BYTES_MAX),
    U64(update, content_hash, 0, UINT64_MAX),     U32(update, participants, 0, DL_SPEC_LEARNERS_MAX),
};

static const struct dl_wire_field evaluation_fields[] = {
    COUNTER(evaluation, round),
    COUNTER(evaluation, tokens),
    F64(evaluation, loss),
    U32(evaluation, sequences, 0, UINT32_MAX),
    U64(evaluation, parameter_hash, 0, UINT64_MAX),
};

static const struct dl_wire_field heartbeat_fields[] = {
    U64(heartbeat, sequence, 0, UINT64_MAX),
    COUNTER(heartbeat, step),
    COUNTER(heartbeat, tokens),
};

static const struct dl_wire_field goodbye_fields[] = {
    U8(goodbye, preempted, 0, 1),
    TEXT(goodbye, text),
};

static const struct dl_wire_field stop_fields[] = {
    U8(stop, result, 0, DL_STOP_FAILED),
    TEXT(stop, text),
};

/* clang-format off */
#define IN_ENTRY(f) ((uint32_t)offsetof(struct dl_trace_entry, f))
/* clang-format on */

const struct dl_wire_field dl_wire_trace_entry_fields[DL_WIRE_TRACE_FIELDS] = {
    {"seq", DL_WIRE_KIND_U64, IN_ENTRY(seq), 0, 1, DL_WIRE_COUNTER_MAX},
    {"step", DL_WIRE_KIND_U64, IN_ENTRY(step), 0, 0, DL_WIRE_COUNTER_MAX},
    {"fragment", DL_WIRE_KIND_U32, IN_ENTRY(fragment), 0, 0, UINT32_MAX},
    {"a", DL_WIRE_KIND_U64, IN_ENTRY(a), 0, 0, UINT64_MAX},
    {"b", DL_WIRE_KIND_U64, IN_ENTRY(b), 0, 0, UINT64_MAX},
    {"c", DL_WIRE_KIND_U64, IN_ENTRY(c), 0, 0, UINT64_MAX},
    {"kind", DL_WIRE_KIND_NAME, IN_ENTRY(kind), DL_TRACE_KIND_MAX, 0, 0},
    {"text", DL_WIRE_KIND_TEXT, IN_ENTRY(text), DL_TRACE_TEXT_MAX, 0, 0},
};

static const struct dl_wire_field trace_fields[] = {
    U64(trace, position, 1, DL_WIRE_COUNTER_MAX),
    U64(trace, nonce, 0, UINT64_MAX),
    NAME(trace, uid),
    TRACE(trace),
};

static const struct dl_wire_field lease_request_fields[] = {
    COUNTER(lease_request, last),
    U32(lease_request, batch, 1, DL_WIRE_BATCH_MAX),
    U8(lease_request, want, 0, 1),
};

static const struct dl_wire_field lease_fields[] = {
    U64(lease, lease, 1, DL_WIRE_COUNTER_MAX),
    COUNTER(lease, first),
    U32(lease, count, 0, UINT32_MAX),
    U8(lease, revoked, 0, 1),
};

static const struct dl_wire_field marker_fields[] = {
    U64(marker, id, 1, UINT64_MAX),
    COUNTER(marker, step),
    COUNTER(marker, tokens),
};

/* A peer that is not there has empty texts. */
/* clang-format off */
#define PEER(i) \
    U32(peers, peers[i].learner, 0, DL_SPEC_LEARNERS_MAX - 1), U64(peers, peers[i].nonce, 0, UINT64_MAX), \
    TEXT(peers, peers[i].uid), TEXT(peers, peers[i].serve), U32(peers, peers[i].step_ms, 0, UINT32_MAX)
/* clang-format on */
static const struct dl_wire_field peers_fields[] = {
    U8(peers, count, 0, DL_WIRE_PEERS_MAX), PEER(0), PEER(1), PEER(2), PEER(3),
};
static_assert(DL_WIRE_PEERS_MAX == 4, "one PEER a place");

static const struct dl_wire_field held_fields[] = {
    FRAGMENT(held),
    COUNTER(held, version),
    U64(held, content_hash, 0, UINT64_MAX),
};

static const struct dl_wire_field recovered_fields[] = {
    U32(recovered, learner, 0, DL_SPEC_LEARNERS_MAX - 1),
    U64(recovered, nonce, 0, UINT64_MAX),
    NAME(recovered, uid),
    COUNTER(recovered, step),
    COUNTER(recovered, bytes),
    COUNTER(recovered, ns),
};

static const struct dl_wire_format formats[] = {
    [DL_WIRE_HELLO] = {"hello", hello_fields, DL_COUNT_OF(hello_fields), DL_WIRE_HELLO_PAYLOAD_MAX},
    [DL_WIRE_WELCOME] = CONTROL("welcome", welcome_fields),
    [DL_WIRE_REFUSE] = CONTROL("refuse", refuse_fields),
    [DL_WIRE_META] = CONTROL("meta", meta_fields),
    [DL_WIRE_PULL] = CONTROL("pull", pull_fields),
    [DL_WIRE_PUSH] = CONTROL("push", push_fields),
    [DL_WIRE_PUSH_NONE] = CONTROL("push_none", push_none_fields),
    [DL_WIRE_CHUNK] = {"chunk", NULL, 0, DL_WIRE_CHUNK_PREFIX_BYTES + DL_WIRE_CHUNK_DATA_MAX},
    [DL_WIRE_RESULT] = CONTROL("result", result_fields),
    [DL_WIRE_UPDATE] = CONTROL("update", update_fields),
    [DL_WIRE_EVALUATION] = CONTROL("evaluation", evaluation_fields),
    [DL_WIRE_HEARTBEAT] = CONTROL("heartbeat", heartbeat_fields),
    [DL_WIRE_GOODBYE] = CONTROL("goodbye", goodbye_fields),
    [DL_WIRE_STOP] = CONTROL("stop", stop_fields),
    [DL_WIRE_TRACE] = CONTROL("trace", trace_fields),
    [DL_WIRE_LEASE_REQUEST] = CONTROL("lease_request", lease_request_fields),
    [DL_WIRE_LEASE] = CONTROL("lease", lease_fields),
    [DL_WIRE_MARKER] = CONTROL("marker", marker_fields),
    [DL_WIRE_PEERS] = CONTROL("peers", peers_fields),
    [DL_WIRE_HELD] = CONTROL("held", held_fields),
    [DL_WIRE_RECOVERED] = CONTROL("recovered", recovered_fields),
};

/* The longest message that is not HELLO must fit: a full list of fragments and a text. */
static_assert(DL_SPEC_FRAGMENTS_MAX * DL_WIRE_FRAGMENT_BYTES + DL_WIRE_TEXT_MAX + 256 <= DL_WIRE_CONTROL_PAYLOAD_MAX,
              "a control payload holds every fragment");
static_assert(DL_WIRE_TRACE_MAX * (48 + DL_TRACE_KIND_MAX + DL_TRACE_TEXT_MAX) + DL_WIRE_UID_MAX + 256 <=
                  DL_WIRE_CONTROL_PAYLOAD_MAX,
              "a control payload holds a full trace");

const struct dl_wire_format *dl_wire_format_of(unsigned type)
{
    return type < DL_COUNT_OF(formats) && formats[type].name != NULL ? &formats[type] : NULL;
}
