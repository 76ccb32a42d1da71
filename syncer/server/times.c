/* Where a round's time goes, measured here: the last rounds' times by stage. Network thread. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/server/internal.h"

const char *sy_stage_name(enum sy_stage stage)
{
    static const char *const names[SY_STAGE_COUNT] = {"wait", "transfer", "merge", "commit", "held", "broadcast"};
    return names[stage];
}

static void add(struct sy_server *server, struct sy_held_fragment *fragment, enum sy_stage stage, int64_t ns)
{
    struct sy_recent *recent = &server->recent[stage];
    double seconds = (double)DL_MAX(ns, 0) / 1e9;
    fragment->stage_seconds[stage] = seconds;
    recent->seconds[recent->count++ % SY_RECENT_ROUNDS] = seconds;
}

void sy_times_offered(struct sy_server *server, uint32_t local)
{
    server->fragments[local].offered_ns = server->now_ns;
}

void sy_times_parked(struct sy_server *server, uint32_t local)
{
    struct sy_held_fragment *fragment = &server->fragments[local];
    fragment->parked_ns = fragment->parked_ns == 0 ? server->now_ns : fragment->parked_ns;
}

/* For how long nothing but the commit kept a receiver from having the version: one of a single chunk waits as a whole. */
static int64_t held_up(const struct sy_server *server, const struct sy_held_fragment *fragment,
                       const struct sy_job *job)
{
    if (fragment->offered_ns == 0) {
        return job->commit_ns;
    }
    return fragment->parked_ns == 0 ? 0 : server->now_ns - fragment->parked_ns;
}

void sy_times_merged(struct sy_server *server, const struct sy_job *job)
{
    struct sy_held_fragment *fragment = &server->fragments[job->local];
    if (fragment->sent_ns > 0) { /* All of the version before that will ever be sent has been. */
        add(server, fragment, SY_STAGE_BROADCAST, fragment->sent_ns - fragment->begun_ns);
    }
    int64_t held_ns = held_up(server, fragment, job);
    fragment->begun_ns = fragment->offered_ns > 0 ? fragment->offered_ns : server->now_ns;
    fragment->sent_ns = fragment->offered_ns = fragment->parked_ns = 0;
    if (!job->seed) {
        add(server, fragment, SY_STAGE_WAIT, fragment->arrival_ns - fragment->pull_ns);
        add(server, fragment, SY_STAGE_TRANSFER, fragment->closed_ns - fragment->arrival_ns);
        add(server, fragment, SY_STAGE_MERGE, job->merge_ns);
        add(server, fragment, SY_STAGE_COMMIT, job->commit_ns);
        add(server, fragment, SY_STAGE_HELD, held_ns);
    }
}

void sy_times_sent(struct sy_server *server, const struct sy_blob *blob)
{
    struct sy_held_fragment *fragment = &server->fragments[sy_local_index(server, blob->fragment)];
    if (fragment->blob == blob && fragment->begun_ns > 0) {
        fragment->sent_ns = server->now_ns;
    }
}

static int compare(const void *a, const void *b)
{
    const double *left = a, *right = b;
    return (*left > *right) - (*left < *right);
}

bool sy_times_recent(const struct sy_server *server, enum sy_stage stage, struct sy_spread *out)
{
    const struct sy_recent *recent = &server->recent[stage];
    size_t count = DL_MIN(recent->count, SY_RECENT_ROUNDS);
    double sorted[SY_RECENT_ROUNDS];
    if (count == 0) {
        return false;
    }
    memcpy(sorted, recent->seconds, count * sizeof sorted[0]);
    qsort(sorted, count, sizeof sorted[0], compare);
    *out = (struct sy_spread){.min = sorted[0], .median = sorted[count / 2], .max = sorted[count - 1]};
    return true;
}
