#include "sim/replay/actor.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "worker/link/link.h"
#include "worker/link/store.h"
#include "worker/train/trainer.h"

#define NOW_NS 1           /* Time does not pass for the link: it decides nothing here. */
#define ACTS_MAX 100000000 /* Chunks of one push; more means that the link does not get on. */

struct sim_actor {
    struct sim_record *record;
    struct sim_incarnation_record *who;
    const struct sim_actor_host *host;
    const struct dl_spec *spec;
    struct wk_trainer *trainer;
    struct wk_link *link;
    struct wk_store *store;
    uint32_t next; /* Entry. */
    uint64_t step, executed, transfers;
    uint64_t taken;                 /* Sequences of the data that were fed to the trainer. */
    uint64_t data_first, data_from; /* Sequence data_from is at position data_first, and so on. */
    bool has_data;
    bool busy;
    struct dl_wire_message message;
};

static enum dl_rc unable(const struct sim_actor *actor, struct dl_err *err, const char *what)
{
    static const struct sim_entry end = {.kind = "the end"};
    const struct sim_entry *entry = actor->next < actor->who->count ? &actor->who->entries[actor->next] : &end;
    return dl_err_set(err, DL_EINVAL, "learner %" PRId64 " (%s), entry %" PRIu64 " (%s at step %" PRIu64 "): %s",
                      actor->who->learner, actor->who->uid, entry->seq, entry->kind, entry->step, what);
}

/* --- joining --- */

static void make_welcome(struct sim_actor *actor, uint32_t shard)
{
    const struct dl_sync_spec *sync = &actor->spec->sync;
    actor->message.type = DL_WIRE_WELCOME;
    struct dl_wire_welcome *welcome = &actor->message.as.welcome;
    memset(welcome, 0, sizeof *welcome);
    welcome->learner = (uint32_t)DL_MAX(actor->who->learner, 0);
    welcome->admission = welcome->epoch = 1;
    welcome->shard = shard;
    welcome->shards = actor->record->shards;
    welcome->fragments_total = sync->fragments;
    welcome->layout = (uint8_t)sync->layout;
    welcome->layout_hash = actor->record->layout->hash;
    welcome->compression = (uint8_t)sync->compression;
    welcome->broadcast_compression = (uint8_t)sync->broadcast_compression;
    welcome->apply = (uint8_t)sync->apply;
    welcome->apply_alpha = (float)sync->apply_alpha;
    welcome->heartbeat_ms = welcome->timeout_ms = WK_WAIT_MS_MAX;
    welcome->pull_within_steps = welcome->update_within_steps = DL_UNBOUNDED;
}

static enum dl_rc join(struct sim_actor *actor, struct dl_err *err)
{
    for (uint32_t s = 0; s < actor->record->shards; s++) {
        struct wk_act act;
        wk_link_next_act(actor->link, NOW_NS, s, &act);
        assert(act.type == WK_ACT_CONNECT);
        wk_link_on_connected(actor->link, NOW_NS, s);
        wk_link_next_act(actor->link, NOW_NS, s, &act);
        assert(act.type == WK_ACT_SEND && act.message->type == DL_WIRE_HELLO);
        make_welcome(actor, s);
        wk_link_on_message(actor->link, NOW_NS, s, &actor->message);
    }
    struct wk_step step;
    wk_link_next_step(actor->link, NOW_NS, &step);
    if (step.type != WK_STEP_PREPARE) {
        struct wk_outcome outcome;
        wk_link_outcome(actor->link, &outcome);
        return dl_err_set(err, DL_EINVAL, "learner %" PRId64 " (%s) cannot join: %.300s", actor->who->learner,
                          actor->who->uid, outcome.text);
    }
    enum dl_rc rc = wk_store_prepare(actor->store, wk_link_layout(actor->link), err);
    if (rc == DL_OK) {
        wk_link_on_prepared(actor->link);
    }
    return rc;
}

/* The job that this process was started with: its hash stands in what it noted at its start. */
static const struct dl_spec *find_spec(const struct sim_record *record, const struct sim_incarnation_record *who)
{
    bool found;
    for (uint32_t i = 0; i < who->count; i++) {
        if (strcmp(who->entries[i].kind, "start") == 0 && who->entries[i].text != NULL &&
            strncmp(who->entries[i].text, "spec=", 5) == 0) {
            return sim_record_spec_by_hash(record, strtoull(who->entries[i].text + 5, NULL, 16), &found);
        }
    }
    return sim_record_spec_by_hash(record, 0, &found);
}

static enum dl_rc open_actor(struct sim_actor *actor, uint32_t threads, struct dl_err *err)
{
    enum dl_rc rc = wk_trainer_new(actor->spec, threads, &actor->trainer, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_model *model = wk_trainer_model(actor->trainer);
    struct wk_link_config config = {
        .role = DL_ROLE_LEARNER,
        .learner = (int32_t)DL_MAX(actor->who->learner, 0),
        .nonce = actor->who->nonce,
        .uid = actor->who->uid,
        .job = actor->spec->name,
        .trainer = actor->who->trainer,
        .shards = actor->record->shards,
        .tensors = wk_model_tensors(model),
        .tensor_count = wk_model_tensor_count(model),
    };
    rc = wk_link_new(&config, &actor->link, err);
    if (rc != DL_OK) {
        return rc;
    }
    actor->store = wk_store_new(wk_model_parameters(model), wk_model_tensor_count(model));
    return actor->store == NULL ? dl_err_set(err, DL_ENOMEM, "replay: no memory") : join(actor, err);
}

enum dl_rc sim_actor_new(struct sim_record *record, uint32_t incarnation, uint32_t threads,
                         const struct sim_actor_host *host, struct sim_actor **out, struct dl_err *err)
{
    struct sim_actor *actor = calloc(1, sizeof *actor);
    if (actor == NULL) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory");
    }
    actor->record = record;
    actor->who = &record->incarnations[incarnation];
    actor->host = host;
    actor->spec = find_spec(record, actor->who);
    enum dl_rc rc = open_actor(actor, threads, err);
    if (rc != DL_OK) {
        sim_actor_free(actor);
        return rc;
    }
    *out = actor;
    return DL_OK;
}

void sim_actor_free(struct sim_actor *actor)
{
    if (actor != NULL) {
        wk_store_free(actor->store);
        wk_link_free(actor->link);
        wk_trainer_free(actor->trainer);
        free(actor);
    }
}

/* --- updates --- */

/* The encoded update into the link's slot, as the network thread would have put it there. */
static enum dl_rc receive(struct sim_actor *actor, uint32_t shard, const float *values, struct dl_err *err)
{
    const struct dl_wire_update *update = &actor->message.as.update;
    struct wk_spot spot;
    uint64_t hash;
    wk_link_on_message(actor->link, NOW_NS, shard, &actor->message);
    for (uint64_t at = 0; at < update->bytes;) {
        uint32_t chunk = (uint32_t)DL_MIN(update->bytes - at, (uint64_t)1 << 30);
        if (wk_link_place(actor->link, NOW_NS, shard, update->transfer, at, chunk, &spot) != WK_PLACE_STORE) {
            return unable(actor, err, "the link does not take this update");
        }
        uint8_t *slot = wk_store_slot(actor->store, spot.fragment, spot.slot, spot.total_bytes);
        if (slot == NULL) {
            return dl_err_set(err, DL_ENOMEM, "replay: no memory for an update");
        }
        if (at == 0) {
            dl_codec_encode((enum dl_codec)update->codec, values,
                            actor->record->layout->fragments[update->fragment].padded_elements / DL_BLOCK, slot);
        }
        at += chunk;
        if (wk_link_on_chunk(actor->link, NOW_NS, shard, true, &hash)) {
            wk_link_on_update(actor->link, NOW_NS, shard, true);
        }
    }
    return DL_OK;
}

static enum dl_rc apply(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    const struct dl_layout *layout = actor->record->layout;
    const float *values = NULL;
    if (entry->fragment >= layout->fragment_count) {
        return unable(actor, err, "there is no such fragment");
    }
    enum dl_rc rc = actor->host->version(actor->host->context, entry->fragment, entry->a, &values, err);
    if (rc != DL_OK) {
        return rc;
    }
    enum dl_codec codec = actor->spec->sync.broadcast_compression;
    actor->message.type = DL_WIRE_UPDATE;
    actor->message.as.update =
        (struct dl_wire_update){.transfer = ++actor->transfers,
                                .fragment = entry->fragment,
                                .version = entry->a,
                                .round = entry->c,
                                .codec = (uint8_t)codec,
                                .bytes = dl_codec_bytes(codec, layout->fragments[entry->fragment].padded_elements)};
    rc = receive(actor, entry->fragment % actor->record->shards, values, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_step step;
    wk_link_next_step(actor->link, NOW_NS, &step);
    if (step.type != WK_STEP_APPLY || step.fragment != entry->fragment || step.rebase != (entry->b != 0)) {
        return unable(actor, err, "the link would not do this here");
    }
    wk_store_apply(actor->store, &step);
    wk_link_on_applied(actor->link, step.fragment);
    actor->host->done_with(actor->host->context, entry->fragment, entry->a);
    return DL_OK;
}

/* --- pushes --- */

/* Whether the update of this very round is mixed with what has been trained since its snapshot: then the push had been sent
 * in full before. */
static bool is_rebased_later(const struct sim_actor *actor, const struct sim_entry *entry)
{
    const struct sim_entry *end = actor->who->entries + actor->who->count;
    for (const struct sim_entry *at = entry + 1; at < end; at++) {
        if (at->fragment == entry->fragment && strcmp(at->kind, "apply") == 0) {
            return at->b == entry->b;
        }
        if (at->fragment == entry->fragment && strcmp(at->kind, "snapshot") == 0) {
            return false;
        }
    }
    return false;
}

/* Takes what the link sends, until the push is out; `head` gets its announcement. */
static enum dl_rc send(struct sim_actor *actor, uint32_t shard, bool whole, struct dl_wire_push *head,
                       struct dl_err *err)
{
    bool announced = false;
    uint64_t sent = 0;
    for (uint64_t guard = 0; guard < ACTS_MAX; guard++) {
        struct wk_act act;
        if (announced && (!whole || sent == head->bytes)) {
            return DL_OK;
        }
        wk_link_next_act(actor->link, NOW_NS, shard, &act);
        if (act.type == WK_ACT_SEND && act.message->type == DL_WIRE_PUSH) {
            *head = act.message->as.push;
            announced = true;
        } else if (act.type == WK_ACT_CHUNK) {
            sent += act.chunk.bytes;
            wk_link_on_chunk_sent(actor->link, NOW_NS, shard);
        } else if (act.type != WK_ACT_SEND) {
            break;
        }
    }
    return unable(actor, err, "the link does not send this push");
}

/* A push that was not sent in full, or of which nobody will ask, is given up. */
static void give_up(struct sim_actor *actor, uint32_t shard, const struct dl_wire_push *head)
{
    actor->message.type = DL_WIRE_RESULT;
    actor->message.as.result =
        (struct dl_wire_result){.round = head->round, .fragment = head->fragment, .verdict = DL_VERDICT_LATE};
    wk_link_on_message(actor->link, NOW_NS, shard, &actor->message);
}

static void number(char out[SIM_VALUE_MAX], uint64_t value)
{
    snprintf(out, SIM_VALUE_MAX, "%" PRIu64, value);
}

/* The announcement against what the tape says was merged; then the bytes are left for the merge. */
static enum dl_rc hand_over(struct sim_actor *actor, const struct sim_entry *entry, const struct dl_wire_push *head,
                            struct dl_err *err)
{
    if (entry->push == SIM_NO_ENTRY) {
        return DL_OK;
    }
    const struct sim_commit *commit = &actor->record->commits[entry->commit];
    struct sim_push *push = &actor->record->pushes[entry->push];
    char tape[SIM_VALUE_MAX], replay[SIM_VALUE_MAX];
    if (head->steps != push->steps || head->tokens != push->tokens) {
        bool steps = head->steps != push->steps;
        number(tape, steps ? push->steps : push->tokens);
        number(replay, steps ? head->steps : head->tokens);
        return sim_differs(actor->host->difference, commit, tape, replay, err, "%s of learner %u",
                           steps ? "steps" : "tokens", push->learner);
    }
    push->encoded_bytes = head->bytes;
    push->encoded = malloc(head->bytes);
    if (push->encoded == NULL) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory for a push of %" PRIu64 " bytes", head->bytes);
    }
    memcpy(push->encoded, wk_store_push(actor->store, entry->fragment, false), head->bytes);
    return DL_OK;
}

static enum dl_rc snapshot(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    uint32_t shard = entry->fragment % actor->record->shards;
    actor->message.type = DL_WIRE_PULL;
    struct wk_link_view view;
    wk_link_view(actor->link, &view);
    actor->message.as.pull = (struct dl_wire_pull){.round = entry->b,
                                                   .fragment = entry->fragment,
                                                   .version = entry->a,
                                                   .pull_within_steps = DL_UNBOUNDED,
                                                   .update_within_steps = DL_UNBOUNDED,
                                                   .trace_acked = view.trace_made};
    wk_link_on_message(actor->link, NOW_NS, shard, &actor->message);
    struct wk_step step;
    wk_link_next_step(actor->link, NOW_NS, &step);
    if (step.type != WK_STEP_SNAPSHOT || step.fragment != entry->fragment) {
        return unable(actor, err, "the link would not do this here");
    }
    enum dl_rc rc = wk_store_snapshot(actor->store, &step, err);
    if (rc != DL_OK) {
        return rc;
    }
    wk_link_on_snapshot(actor->link, step.fragment);
    struct dl_wire_push head = {0};
    bool whole = is_rebased_later(actor, entry);
    rc = send(actor, shard, whole, &head, err);
    if (rc == DL_OK && !whole) {
        give_up(actor, shard, &head);
    }
    return rc == DL_OK ? hand_over(actor, entry, &head, err) : rc;
}

/* --- what the trainer noted --- */

/* Sequences up to (without) number `until`, from where the tape says that they come. */
static enum dl_rc feed(struct sim_actor *actor, uint64_t until, struct dl_err *err)
{
    uint64_t count = until - actor->taken;
    if (count == 0) {
        return DL_OK;
    }
    if (!actor->has_data || count > wk_trainer_lacks(actor->trainer)) {
        return unable(actor, err, "the tape does not say which data it trained on before");
    }
    enum dl_rc rc =
        wk_trainer_feed(actor->trainer, actor->data_first + (actor->taken - actor->data_from), (uint32_t)count, err);
    actor->taken += rc == DL_OK ? count : 0;
    return rc;
}

/* A joiner takes over the optimiser's state as it is now. */
static enum dl_rc capture(struct sim_actor *actor, struct dl_err *err)
{
    struct sim_capture *wanted =
        sim_record_capture(actor->record, (uint32_t)(actor->who - actor->record->incarnations), actor->step);
    if (wanted == NULL || wanted->bytes != NULL) {
        return DL_OK;
    }
    struct wk_trainer_state part;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < wk_trainer_state_count(actor->trainer); i++) {
        wk_trainer_state(actor->trainer, i, &part);
        bytes += part.bytes;
    }
    wanted->bytes = malloc(bytes);
    if (wanted->bytes == NULL) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory for an optimiser's state of %" PRIu64 " bytes", bytes);
    }
    uint8_t *at = wanted->bytes;
    for (uint32_t i = 0; i < wk_trainer_state_count(actor->trainer); i++) {
        wk_trainer_state(actor->trainer, i, &part);
        memcpy(at, part.data, part.bytes);
        at += part.bytes;
    }
    return DL_OK;
}

static enum dl_rc train(struct sim_actor *actor, bool counted, struct dl_err *err)
{
    struct wk_trainer_step step = {0};
    enum dl_rc rc = feed(actor, actor->taken + wk_trainer_lacks(actor->trainer), err);
    if (rc == DL_OK) {
        rc = wk_trainer_step(actor->trainer, &step, err);
    }
    if (rc == DL_OK && counted) {
        wk_link_on_step(actor->link, NOW_NS, step.tokens, (float)step.loss);
        actor->step++;
        rc = capture(actor, err);
    }
    actor->executed++;
    return rc;
}

static enum dl_rc start(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    wk_trainer_start(actor->trainer, entry->b);
    struct wk_dataset_view data;
    wk_dataset_view(wk_trainer_dataset(actor->trainer), &data);
    char sequences[48];
    snprintf(sequences, sizeof sequences, " sequences=%" PRIu64 " ", data.training_sequences);
    if (entry->text != NULL && strstr(entry->text, sequences) == NULL) {
        return unable(actor, err, "the data are not what they were then: they hold another number of sequences");
    }
    wk_link_trace(actor->link, "start", DL_TRACE_NO_FRAGMENT, entry->a, entry->b, entry->c, entry->text);
    return DL_OK;
}

static enum dl_rc schedule(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    if (!wk_trainer_hear(actor->trainer, entry->b) || wk_trainer_place(actor->trainer) != entry->a) {
        return unable(actor, err, "the schedule would not move so here");
    }
    wk_link_trace(actor->link, "schedule", DL_TRACE_NO_FRAGMENT, entry->a, entry->b, 0, NULL);
    return DL_OK;
}

static enum dl_rc state(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    uint32_t peer = sim_record_peer(actor->record, entry);
    enum dl_rc rc = actor->host->peer(actor->host->context, peer, entry->b, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct sim_capture *taken = sim_record_capture(actor->record, peer, entry->b);
    if (taken == NULL || taken->bytes == NULL) {
        return unable(actor, err, "the peer's state is not there");
    }
    const uint8_t *at = taken->bytes;
    for (uint32_t i = 0; i < wk_trainer_state_count(actor->trainer); i++) {
        struct wk_trainer_state part;
        wk_trainer_state(actor->trainer, i, &part);
        memcpy(part.data, at, part.bytes);
        at += part.bytes;
    }
    wk_trainer_take_state(actor->trainer);
    if (--taken->uses == 0) {
        free(dl_take(taken->bytes));
    }
    wk_link_trace(actor->link, "state", DL_TRACE_NO_FRAGMENT, entry->a, entry->b, entry->c, entry->text);
    return DL_OK;
}

static enum dl_rc data(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    if (entry->text == NULL || strncmp(entry->text, "taken=", 6) != 0) {
        return unable(actor, err, "it does not say from which sequence on");
    }
    uint64_t from = strtoull(entry->text + 6, NULL, 10);
    enum dl_rc rc = from < actor->taken ? unable(actor, err, "sequences were taken already") : feed(actor, from, err);
    actor->has_data = true;
    actor->data_first = entry->b;
    actor->data_from = from;
    wk_link_trace(actor->link, "data", DL_TRACE_NO_FRAGMENT, entry->a, entry->b, entry->c, entry->text);
    return rc;
}

static enum dl_rc uncounted(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    for (uint64_t i = 0; i < entry->a; i++) {
        enum dl_rc rc = train(actor, false, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    wk_link_trace(actor->link, "uncounted", DL_TRACE_NO_FRAGMENT, entry->a, 0, 0, NULL);
    return DL_OK;
}

/* --- entries --- */

static const struct {
    const char *kind;
    enum dl_rc (*perform)(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err);
} kinds[] = {{"apply", apply}, {"snapshot", snapshot}, {"start", start},        {"schedule", schedule},
             {"data", data},   {"state", state},       {"uncounted", uncounted}};

/* What the link has noted of it now is what the tape says it noted then. */
static enum dl_rc compare(struct sim_actor *actor, const struct sim_entry *entry, struct dl_err *err)
{
    struct dl_trace_entry now;
    if (!wk_link_trace_newest(actor->link, &now) || now.seq != entry->seq || now.step != entry->step ||
        now.a != entry->a || now.b != entry->b || now.c != entry->c || now.fragment != entry->fragment ||
        strcmp(now.kind, entry->kind) != 0) {
        char text[200];
        snprintf(text, sizeof text, "executed again it is %s %u %" PRIu64 " %" PRIu64 " %" PRIu64 " at step %" PRIu64,
                 now.kind, now.fragment, now.a, now.b, now.c, now.step);
        return unable(actor, err, text);
    }
    return DL_OK;
}

static enum dl_rc perform(struct sim_actor *actor, struct dl_err *err)
{
    const struct sim_entry *entry = &actor->who->entries[actor->next];
    if (entry->seq != actor->next + UINT64_C(1)) {
        return unable(actor, err, "entries before it are missing in the tape");
    }
    while (actor->step < entry->step) {
        enum dl_rc rc = train(actor, true, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    for (size_t i = 0; i < DL_COUNT_OF(kinds); i++) {
        if (strcmp(entry->kind, kinds[i].kind) == 0) {
            enum dl_rc rc = kinds[i].perform(actor, entry, err);
            return rc == DL_OK ? compare(actor, entry, err) : rc;
        }
    }
    return unable(actor, err, "noted by a trainer of which this program knows nothing; try --verify-only");
}

enum dl_rc sim_actor_advance(struct sim_actor *actor, uint32_t entry, struct dl_err *err)
{
    if (actor->next > entry) {
        return DL_OK;
    }
    if (actor->busy) {
        return unable(actor, err, "depends on what came after it: the tape contradicts itself");
    }
    actor->busy = true;
    enum dl_rc rc = DL_OK;
    while (rc == DL_OK && actor->next <= entry) {
        rc = perform(actor, err);
        actor->next += rc == DL_OK ? 1 : 0;
    }
    actor->busy = false;
    return rc;
}

enum dl_rc sim_actor_reach(struct sim_actor *actor, uint64_t step, struct dl_err *err)
{
    if (actor->step >= step) {
        return actor->step == 0 ? capture(actor, err) : DL_OK;
    }
    uint32_t until = actor->next;
    while (until < actor->who->count && actor->who->entries[until].step < step) {
        until++;
    }
    enum dl_rc rc = until > actor->next ? sim_actor_advance(actor, until - 1, err) : DL_OK;
    while (rc == DL_OK && actor->step < step) {
        rc = train(actor, true, err);
    }
    return rc;
}

bool sim_actor_is_done(const struct sim_actor *actor)
{
    return actor->next >= actor->who->needed && actor->step >= actor->who->needed_steps;
}

const float *sim_actor_seed(struct sim_actor *actor, uint32_t fragment)
{
    return (const float *)(const void *)wk_store_push(actor->store, fragment, true);
}

uint64_t sim_actor_steps(const struct sim_actor *actor)
{
    return actor->executed;
}
