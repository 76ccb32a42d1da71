#include "worker/link/fetch.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/content.h"
#include "common/mem.h"
#include "worker/link/get.h"
#include "worker/link/net.h"

#define TURN_MS 100
#define RETRY_BUDGET 3 /* Of one peer, without progress: a broken connection costs 1, a stalled one 2. */

enum stage { STAGE_PICK, STAGE_MANIFEST, STAGE_STATES, STAGE_FRAGMENTS, STAGE_OVER };

struct wk_fetch {
    /* Hashed as it comes: the part of optimiser state or trace, or the fragment, that is under way. They go on where a
     * connection broke, as what they are of does. */
    struct dl_content state_content, fragment_content;
    struct wk_hub *hub;
    const struct wk_state *states;
    uint32_t state_count;
    int64_t progress_ns;
    enum stage stage;
    struct wk_get get;
    bool asked; /* A request is under way. */
    int64_t begun_ns, waiting_ns;
    int64_t allowance_ns; /* For a peer's snapshot of as much as this learner's state. */
    uint64_t bytes;

    struct dl_wire_peer peer;
    unsigned spent; /* Of RETRY_BUDGET. */
    bool broken;    /* Something of this peer did not match its hash. */
    bool answered;  /* Some peer's manifest was accepted. */
    uint8_t *head;  /* The manifest while it comes in. */
    struct wk_manifest manifest;

    uint64_t state_bytes; /* All states and the trace entries. */
    uint64_t done;        /* Of those, from this peer. */
    bool touched, complete;
    struct dl_wire_recovered report;
    uint8_t *trace;
    uint64_t trace_bytes;

    struct wk_memory staging; /* One fragment. */
    uint64_t staged;
    uint32_t staged_fragment;
    uint64_t staged_version, staged_hash;
};

static void say(const struct wk_fetch *fetch, int level, const char *fmt, ...) DL_PRINTF(3, 4);
static void say(const struct wk_fetch *fetch, int level, const char *fmt, ...)
{
    char text[DL_ERR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (fetch->hub->log != NULL) {
        fetch->hub->log(fetch->hub->log_context, level, text);
    }
}

static double elapsed(const struct wk_fetch *fetch)
{
    return (double)(dl_now_ns() - fetch->begun_ns) / 1e9;
}

/* --- beginning and ending ---------------------------------------------------------------------------------------- */

struct wk_fetch *wk_fetch_new(struct wk_hub *hub, const struct wk_state *states, uint32_t state_count,
                              int64_t progress_ns)
{
    struct wk_fetch *fetch = dl_alloc_aligned(sizeof *fetch);
    if (fetch != NULL) {
        fetch->hub = hub;
        fetch->states = states;
        fetch->state_count = state_count;
        fetch->progress_ns = progress_ns > 0 ? progress_ns : WK_FETCH_PROGRESS_NS;
        fetch->staged_fragment = UINT32_MAX;
        wk_get_init(&fetch->get, hub->tls, hub->token);
    }
    return fetch;
}

void wk_fetch_free(struct wk_fetch *fetch)
{
    if (fetch != NULL) {
        wk_get_close(&fetch->get);
        wk_manifest_release(&fetch->manifest);
        free(fetch->head);
        free(fetch->trace);
        free(fetch->staging.bytes);
        free(fetch);
    }
}

const struct dl_wire_recovered *wk_fetch_report(const struct wk_fetch *fetch)
{
    return fetch->stage == STAGE_OVER && fetch->complete && fetch->state_count > 0 ? &fetch->report : NULL;
}

static void end(struct wk_fetch *fetch)
{
    fetch->stage = STAGE_OVER;
    wk_get_close(&fetch->get);
    free(fetch->staging.bytes);
    fetch->staging = (struct wk_memory){.bytes = NULL};
    if (fetch->touched && !fetch->complete) {
        for (uint32_t i = 0; i < fetch->state_count; i++) {
            memset(fetch->states[i].data, 0, fetch->states[i].bytes);
        }
    }
    fetch->report.bytes = fetch->bytes;
    fetch->report.ns = (uint64_t)(dl_now_ns() - fetch->begun_ns);
    const struct dl_wire_recovered *report = wk_fetch_report(fetch);
    struct dl_err err = {.rc = DL_OK};
    pthread_mutex_lock(&fetch->hub->lock);
    enum dl_rc rc = report == NULL || fetch->trace == NULL
                        ? DL_OK
                        : wk_trace_unpack(fetch->hub->link, fetch->trace, fetch->trace_bytes, &err);
    wk_link_on_recovered(fetch->hub->link, report);
    pthread_mutex_unlock(&fetch->hub->lock);
    if (rc != DL_OK) {
        say(fetch, 2, "%s: this run may not be replayed from here", err.text);
    }
    free(dl_take(fetch->trace));
    wk_net_wake(fetch->hub);
}

static void tell_offers(struct wk_fetch *fetch)
{
    pthread_mutex_lock(&fetch->hub->lock);
    wk_link_tell_offers(fetch->hub->link);
    pthread_mutex_unlock(&fetch->hub->lock);
    wk_net_wake(fetch->hub);
}

/* This peer is given up; another one begins with its manifest. Where it has been waited for in vain the syncer is to hold nothing
 * back any longer: it may be the only one that gives anything. */
static void next_peer(struct wk_fetch *fetch, const struct dl_err *err)
{
    say(fetch, 2, "learner %u is no source of state: %s", fetch->peer.learner, err->text);
    wk_get_close(&fetch->get);
    wk_manifest_release(&fetch->manifest);
    fetch->stage = STAGE_PICK;
    fetch->asked = false;
    if (!fetch->answered && dl_now_ns() - fetch->begun_ns >= fetch->progress_ns) {
        tell_offers(fetch);
    }
}

/* After a failure of the request: the same peer again from where it broke, or the next one. */
static void failed(struct wk_fetch *fetch, uint64_t progress, const struct dl_err *err)
{
    bool again = (err->rc == DL_ENET || err->rc == DL_ETIMEOUT) && !fetch->broken;
    fetch->spent = progress > 0 ? 0 : fetch->spent;
    fetch->spent += err->rc == DL_ETIMEOUT ? 2 : 1;
    fetch->asked = false;
    if (!again || fetch->spent >= RETRY_BUDGET) {
        next_peer(fetch, err);
    } else {
        uint64_t at = fetch->get.first + progress;
        say(fetch, 1, "%s; going on at byte %" PRIu64, err->text, at);
    }
}

static void begin(struct wk_fetch *fetch, int64_t now_ns)
{
    pthread_mutex_lock(&fetch->hub->lock);
    uint64_t bytes = wk_link_layout(fetch->hub->link)->elements * sizeof(float);
    pthread_mutex_unlock(&fetch->hub->lock);
    for (uint32_t i = 0; i < fetch->state_count; i++) {
        bytes += fetch->states[i].bytes;
    }
    fetch->allowance_ns = wk_snapshot_allowance_ns(bytes);
    fetch->begun_ns = now_ns;
}

static void pick(struct wk_fetch *fetch)
{
    int64_t now_ns = dl_now_ns();
    if (fetch->begun_ns == 0) {
        begin(fetch, now_ns);
    }
    bool late = !fetch->answered && now_ns - fetch->begun_ns >= WK_FETCH_MANIFEST_NS + fetch->allowance_ns;
    pthread_mutex_lock(&fetch->hub->lock);
    bool any = !late && wk_link_next_peer(fetch->hub->link, &fetch->peer);
    pthread_mutex_unlock(&fetch->hub->lock);
    if (!any) {
        end(fetch);
        return;
    }
    fetch->stage = STAGE_MANIFEST;
    fetch->spent = 0;
    fetch->broken = fetch->asked = false;
}

/* --- the manifest ------------------------------------------------------------------------------------------------ */

static uint8_t *place_head(void *context, uint64_t offset, uint64_t *room)
{
    struct wk_fetch *fetch = context;
    uint64_t bytes = fetch->get.answer.length;
    if (offset == 0) {
        free(fetch->head);
        fetch->head = bytes <= WK_MANIFEST_BYTES_MAX ? malloc(bytes) : NULL;
    }
    *room = bytes - offset;
    return fetch->head == NULL ? NULL : fetch->head + offset;
}

static void progress_head(void *context, uint64_t offset, uint64_t bytes)
{
    (void)context;
    (void)offset;
    (void)bytes;
}

/* Whether the optimiser state that is offered is of the kind that this trainer has. */
static bool states_match(const struct wk_fetch *fetch)
{
    bool same = fetch->manifest.state_count == fetch->state_count;
    for (uint32_t i = 0; same && i < fetch->state_count; i++) {
        same = fetch->manifest.states[i].bytes == fetch->states[i].bytes &&
               strcmp(fetch->manifest.states[i].name, fetch->states[i].name) == 0;
    }
    return same;
}

static enum dl_rc check_manifest(const struct wk_fetch *fetch, const struct dl_layout *layout, enum dl_codec codec,
                                 struct dl_err *err)
{
    const struct wk_manifest *manifest = &fetch->manifest;
    if (manifest->nonce != fetch->peer.nonce || strcmp(manifest->uid, fetch->peer.uid) != 0) {
        return dl_err_set(err, DL_EPROTO, "at its address there is another learner, %u", manifest->learner);
    }
    if (manifest->layout_hash != layout->hash || manifest->codec != codec ||
        manifest->fragment_count != layout->fragment_count) {
        return dl_err_set(err, DL_EPROTO, "its layout of fragments is another one");
    }
    for (uint32_t p = 0; p < layout->fragment_count; p++) {
        if (manifest->fragments[p].bytes != dl_codec_bytes(codec, layout->fragments[p].padded_elements)) {
            return dl_err_set(err, DL_EPROTO, "its fragment %u has another size", p);
        }
    }
    return DL_OK;
}

static void begin_fragments(struct wk_fetch *fetch)
{
    tell_offers(fetch);
    fetch->stage = STAGE_FRAGMENTS;
    fetch->waiting_ns = dl_now_ns();
}

static void take_manifest(struct wk_fetch *fetch)
{
    struct dl_err err;
    struct wk_hub *hub = fetch->hub;
    pthread_mutex_lock(&hub->lock);
    const struct dl_layout *layout = wk_link_layout(hub->link);
    enum dl_codec codec = wk_link_broadcast_codec(hub->link);
    pthread_mutex_unlock(&hub->lock);
    if (wk_manifest_decode(fetch->head, fetch->get.answer.length, &fetch->manifest, &err) != DL_OK ||
        check_manifest(fetch, layout, codec, &err) != DL_OK) {
        next_peer(fetch, &err);
        return;
    }
    struct wk_offer offers[DL_SPEC_FRAGMENTS_MAX];
    for (uint32_t p = 0; p < layout->fragment_count; p++) {
        const struct wk_manifest_fragment *fragment = &fetch->manifest.fragments[p];
        offers[p] = (struct wk_offer){fragment->version, fragment->round, fragment->hash};
    }
    pthread_mutex_lock(&hub->lock);
    wk_link_on_offers(hub->link, offers);
    pthread_mutex_unlock(&hub->lock);
    uint64_t states_offset = wk_manifest_states_offset(&fetch->manifest);
    bool match = states_match(fetch);
    if (!match && !fetch->complete) {
        say(fetch, 2, "learner %u keeps other optimiser state (%u parts, here %u): not taken over", fetch->peer.learner,
            fetch->manifest.state_count, fetch->state_count);
    }
    say(fetch, 0, "learner %u offers its state as of step %llu: %llu bytes, after %.2f s", fetch->peer.learner,
        (unsigned long long)fetch->manifest.step, (unsigned long long)wk_manifest_total(&fetch->manifest),
        elapsed(fetch));
    fetch->answered = true;
    fetch->state_bytes = wk_manifest_total(&fetch->manifest) - states_offset;
    fetch->done = 0;
    fetch->stage = STAGE_STATES;
    if (!match || fetch->complete || fetch->state_count == 0) {
        begin_fragments(fetch);
    }
}

static void get_manifest(struct wk_fetch *fetch)
{
    struct dl_err err;
    enum dl_rc rc = DL_OK;
    if (!fetch->asked) {
        /* It needs memory for a snapshot, and answers at its next boundary: either may take long, but others may be quicker. */
        int64_t patience_ns = 5 * fetch->progress_ns / 2 + 2 * (int64_t)fetch->peer.step_ms * DL_NS_PER_MS;
        rc = wk_get_begin(&fetch->get, fetch->peer.serve, "/v1/state", 0, 0,
                          DL_MIN(patience_ns, WK_FETCH_MANIFEST_NS / 2) + fetch->allowance_ns, place_head,
                          progress_head, fetch, &err);
        fetch->asked = rc == DL_OK;
    }
    rc = rc == DL_OK ? wk_get_pump(&fetch->get, TURN_MS, &err) : rc;
    if (rc == DL_OK) {
        fetch->asked = false;
        take_manifest(fetch);
    } else if (rc == DL_ENET) {
        failed(fetch, 0, &err);
    } else if (rc != DL_AGAIN) {
        next_peer(fetch, &err);
    }
}

/* Until the request is out: what the caller does next takes time that the peer can use. */
static void ask_for_manifest(struct wk_fetch *fetch)
{
    int64_t until_ns = dl_now_ns() + TURN_MS * DL_NS_PER_MS;
    do {
        if (fetch->stage == STAGE_MANIFEST) {
            get_manifest(fetch);
        }
    } while (fetch->stage == STAGE_MANIFEST && fetch->get.state < WK_GET_HEAD && dl_now_ns() < until_ns);
}

/* --- optimiser state --------------------------------------------------------------------------------------------- */

/* The part that byte `at` of states and trace lies in, and how far into it. UINT32_MAX: the trace. */
static uint32_t part_at(const struct wk_fetch *fetch, uint64_t at, uint64_t *into)
{
    for (uint32_t i = 0; i < fetch->state_count; i++) {
        if (at < fetch->states[i].bytes) {
            *into = at;
            return i;
        }
        at -= fetch->states[i].bytes;
    }
    *into = at;
    return UINT32_MAX;
}

static uint8_t *place_state(void *context, uint64_t offset, uint64_t *room)
{
    struct wk_fetch *fetch = context;
    uint64_t into = 0;
    (void)offset;
    uint32_t part = part_at(fetch, fetch->done, &into);
    if (part == UINT32_MAX) {
        if (into == 0) {
            free(fetch->trace);
            fetch->trace = malloc(DL_MAX(fetch->manifest.trace_bytes, 1u));
        }
        *room = fetch->manifest.trace_bytes - into;
        return fetch->trace == NULL ? NULL : fetch->trace + into;
    }
    fetch->touched = true;
    *room = fetch->states[part].bytes - into;
    return (uint8_t *)fetch->states[part].data + into;
}

static void progress_state(void *context, uint64_t offset, uint64_t bytes)
{
    struct wk_fetch *fetch = context;
    uint64_t into = 0;
    (void)offset;
    uint32_t part = part_at(fetch, fetch->done, &into);
    bool is_trace = part == UINT32_MAX;
    const uint8_t *data = is_trace ? fetch->trace : fetch->states[part].data;
    uint64_t whole = is_trace ? fetch->manifest.trace_bytes : fetch->states[part].bytes;
    fetch->done += bytes;
    fetch->bytes += bytes;
    if (into == 0) {
        dl_content_begin(&fetch->state_content);
    }
    dl_content_add(&fetch->state_content, data + into, bytes);
    if (into + bytes == whole) {
        uint64_t hash = is_trace ? fetch->manifest.trace_hash : fetch->manifest.states[part].hash;
        fetch->broken = fetch->broken || dl_content_result(&fetch->state_content) != hash;
    }
}

static enum dl_rc request(struct wk_fetch *fetch, uint64_t first, uint64_t count, wk_get_place *place,
                          wk_get_progress *progress, struct dl_err *err)
{
    char path[48];
    snprintf(path, sizeof path, "/v1/state/%016llx", (unsigned long long)fetch->manifest.id);
    enum dl_rc rc = wk_get_begin(&fetch->get, fetch->peer.serve, path, first, count, fetch->progress_ns, place,
                                 progress, fetch, err);
    fetch->asked = rc == DL_OK;
    return rc;
}

static void got_states(struct wk_fetch *fetch)
{
    say(fetch, 0, "optimiser state of learner %u is here, %llu bytes, after %.2f s", fetch->peer.learner,
        (unsigned long long)fetch->state_bytes, elapsed(fetch));
    fetch->complete = true;
    fetch->trace_bytes = fetch->manifest.trace_bytes;
    fetch->report = (struct dl_wire_recovered){
        .learner = fetch->manifest.learner, .nonce = fetch->manifest.nonce, .step = fetch->manifest.step};
    memcpy(fetch->report.uid, fetch->manifest.uid, sizeof fetch->report.uid);
    begin_fragments(fetch);
}

static void get_states(struct wk_fetch *fetch)
{
    struct dl_err err;
    enum dl_rc rc = DL_OK;
    if (!fetch->asked) {
        rc = request(fetch, wk_manifest_states_offset(&fetch->manifest) + fetch->done, fetch->state_bytes - fetch->done,
                     place_state, progress_state, &err);
    }
    rc = rc == DL_OK ? wk_get_pump(&fetch->get, TURN_MS, &err) : rc;
    if (fetch->broken) {
        rc = dl_err_set(&err, DL_ECORRUPT, "its optimiser state does not match its hash");
    }
    if (rc == DL_OK) {
        fetch->asked = false;
        got_states(fetch);
    } else if (rc != DL_AGAIN) {
        failed(fetch, fetch->get.received, &err);
    }
}

/* --- fragments --------------------------------------------------------------------------------------------------- */

static uint8_t *place_fragment(void *context, uint64_t offset, uint64_t *room)
{
    struct wk_fetch *fetch = context;
    (void)offset;
    *room = fetch->manifest.fragments[fetch->staged_fragment].bytes - fetch->staged;
    return fetch->staging.bytes + fetch->staged;
}

static void progress_fragment(void *context, uint64_t offset, uint64_t bytes)
{
    struct wk_fetch *fetch = context;
    (void)offset;
    if (fetch->staged == 0) {
        dl_content_begin(&fetch->fragment_content);
    }
    dl_content_add(&fetch->fragment_content, fetch->staging.bytes + fetch->staged, bytes);
    fetch->staged += bytes;
    fetch->bytes += bytes;
}

/* The next fragment to fetch: the one that is partly here, else the first that is confirmed. `*waits`: the syncer's word on
 * some is missing. */
static bool choose(struct wk_fetch *fetch, uint32_t *chosen, bool *waits)
{
    bool any = false;
    *waits = false;
    pthread_mutex_lock(&fetch->hub->lock);
    for (uint32_t p = 0; p < fetch->manifest.fragment_count; p++) {
        enum wk_offer_state state = wk_link_offer(fetch->hub->link, p);
        *waits = *waits || state == WK_OFFER_WAIT;
        if (state == WK_OFFER_TAKE && (!any || p == fetch->staged_fragment)) {
            any = true;
            *chosen = p;
        }
    }
    pthread_mutex_unlock(&fetch->hub->lock);
    return any;
}

/* Nothing can be fetched before the syncer has spoken, or something newer has come. */
static void wait_for_word(struct wk_fetch *fetch)
{
    struct wk_hub *hub = fetch->hub;
    int64_t now_ns = dl_now_ns(), until_ns = now_ns + TURN_MS * DL_NS_PER_MS;
    if (now_ns - fetch->waiting_ns >= WK_FETCH_CONFIRM_NS) {
        say(fetch, 2, "the syncer has not confirmed what learner %u holds: the rest is awaited from it",
            fetch->peer.learner);
        end(fetch);
        return;
    }
    struct timespec until = {.tv_sec = until_ns / DL_NS_PER_SECOND, .tv_nsec = until_ns % DL_NS_PER_SECOND};
    pthread_mutex_lock(&hub->lock);
    pthread_cond_timedwait(&hub->changed, &hub->lock, &until);
    pthread_mutex_unlock(&hub->lock);
}

static enum dl_rc begin_fragment(struct wk_fetch *fetch, uint32_t p, struct dl_err *err)
{
    const struct wk_manifest_fragment *fragment = &fetch->manifest.fragments[p];
    bool same = p == fetch->staged_fragment && fragment->version == fetch->staged_version &&
                fragment->hash == fetch->staged_hash && fetch->staged < fragment->bytes;
    if (!same) {
        fetch->staged = 0;
        fetch->staged_fragment = p;
        fetch->staged_version = fragment->version;
        fetch->staged_hash = fragment->hash;
    }
    if (fetch->staging.size < fragment->bytes) {
        fetch->staged = 0;
    }
    if (wk_memory_grow(&fetch->staging, fragment->bytes) == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a fragment of %llu bytes",
                          (unsigned long long)fragment->bytes);
    }
    return request(fetch, wk_manifest_fragment_offset(&fetch->manifest, p) + fetch->staged,
                   fragment->bytes - fetch->staged, place_fragment, progress_fragment, err);
}

static enum dl_rc adopt(struct wk_fetch *fetch, struct dl_err *err)
{
    uint32_t p = fetch->staged_fragment;
    struct wk_hub *hub = fetch->hub;
    if (dl_content_result(&fetch->fragment_content) != fetch->staged_hash) {
        fetch->staged = 0;
        return dl_err_set(err, DL_ECORRUPT, "its fragment %u does not match its hash", p);
    }
    pthread_mutex_lock(&hub->lock);
    bool wanted = wk_link_adopt(hub->link, p);
    pthread_mutex_unlock(&hub->lock);
    if (wanted) {
        wk_store_adopt(hub->store, p, fetch->manifest.codec, &fetch->staging);
        pthread_mutex_lock(&hub->lock);
        wk_link_on_applied(hub->link, p);
        pthread_mutex_unlock(&hub->lock);
    }
    fetch->staged = 0;
    fetch->staged_fragment = UINT32_MAX;
    return DL_OK;
}

static void get_fragments(struct wk_fetch *fetch)
{
    struct dl_err err = {.rc = DL_OK};
    enum dl_rc rc = DL_OK;
    if (!fetch->asked) {
        uint32_t p = 0;
        bool waits = false;
        if (!choose(fetch, &p, &waits)) {
            if (waits) {
                wait_for_word(fetch);
            } else {
                end(fetch);
            }
            return;
        }
        rc = begin_fragment(fetch, p, &err);
    }
    rc = rc == DL_OK ? wk_get_pump(&fetch->get, TURN_MS, &err) : rc;
    if (rc == DL_OK) {
        fetch->asked = false;
        fetch->waiting_ns = dl_now_ns();
        rc = adopt(fetch, &err);
        fetch->broken = rc != DL_OK;
    }
    if (rc != DL_OK && rc != DL_AGAIN) {
        failed(fetch, fetch->get.received, &err);
    }
}

void wk_fetch_turn(struct wk_fetch *fetch)
{
    switch (fetch->stage) {
    case STAGE_PICK:
        pick(fetch);
        ask_for_manifest(fetch);
        break;
    case STAGE_MANIFEST: get_manifest(fetch); break;
    case STAGE_STATES: get_states(fetch); break;
    case STAGE_FRAGMENTS: get_fragments(fetch); break;
    case STAGE_OVER: break;
    }
}
