/* sim_world, the job's data: what trainers take, what shard 0 has on its disk of the leases, and what must hold of both. The
 * rules here are written anew, position by position, so that they can contradict the ledger of the core. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

/* --- what is trained on ------------------------------------------------------------------------------------------ */

static void remember(struct sim_world *world, struct sim_incarnation *who, const struct wk_range *range)
{
    struct wk_range *last = who->taken_count == 0 ? NULL : &who->taken[who->taken_count - 1];
    if (last != NULL && last->lease == range->lease && last->first + last->count == range->first) {
        last->count += range->count;
        return;
    }
    if (who->taken_count == who->taken_capacity) {
        uint32_t capacity = DL_MAX(2 * who->taken_capacity, 8u);
        struct wk_range *grown = realloc(who->taken, capacity * sizeof *grown);
        if (grown == NULL) {
            sim_fail(world, "no memory for the data");
            return;
        }
        who->taken = grown;
        who->taken_capacity = capacity;
    }
    assert(who->taken != NULL);
    who->taken[who->taken_count++] = *range;
}

void sim_data_take(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    for (uint64_t missing = SIM_BATCH; missing > 0;) {
        struct wk_range range;
        wk_link_data(learner->link, missing, &range);
        if (range.count == 0 || range.count > missing) {
            sim_fail(world, "learner %u got %llu sequences of %llu", n, (unsigned long long)range.count,
                     (unsigned long long)missing);
            return;
        }
        if (range.lease != learner->source) {
            sim_tape_done(world, n, "data", DL_TRACE_NO_FRAGMENT, range.lease);
            learner->source = range.lease;
        }
        missing -= range.count;
        world->counts.sequences += range.count;
        world->counts.unleased += range.lease == 0 ? range.count : 0;
        if (range.lease > 0) {
            remember(world, &world->incarnations[learner->incarnation], &range);
        }
    }
}

static bool has_trained_on(const struct sim_incarnation *who, uint64_t lease, uint64_t position)
{
    for (uint32_t i = 0; i < who->taken_count; i++) {
        const struct wk_range *range = &who->taken[i];
        if (range->lease == lease && position >= range->first && position < range->first + range->count) {
            return true;
        }
    }
    return false;
}

/* --- the disk ---------------------------------------------------------------------------------------------------- */

static uint64_t high_water(const struct sim_data *data)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < data->lease_count; i++) {
        end = DL_MAX(end, data->leases[i].first + data->leases[i].count);
    }
    return end;
}

static bool grow_positions(struct sim_data *data, uint64_t positions)
{
    if (positions <= data->position_capacity) {
        return true;
    }
    uint64_t capacity = DL_MAX(2 * positions, UINT64_C(4096));
    uint32_t *counted_by = realloc(data->counted_by, capacity * sizeof *counted_by);
    if (counted_by != NULL) {
        data->counted_by = counted_by;
    }
    uint8_t *seen = realloc(data->seen, capacity);
    if (seen != NULL) {
        data->seen = seen;
    }
    if (counted_by == NULL || seen == NULL) {
        return false;
    }
    memset(data->counted_by + data->position_capacity, 0,
           (capacity - data->position_capacity) * sizeof *data->counted_by);
    data->position_capacity = capacity;
    return true;
}

static void see(struct sim_world *world, uint64_t first, uint64_t count, const char *what)
{
    struct sim_data *data = &world->data;
    for (uint64_t g = first; g < first + count; g++) {
        if (data->seen[g]++ != 0) {
            sim_fail(world, "position %llu of the data is there twice, once as %s", (unsigned long long)g, what);
            return;
        }
    }
}

/* Each position below the high-water mark is counted, leased or queued, once. */
static void check(struct sim_world *world)
{
    struct sim_data *data = &world->data;
    uint64_t end = high_water(data);
    if (!grow_positions(data, end)) {
        sim_fail(world, "no memory for the data");
        return;
    }
    memset(data->seen, 0, end);
    for (uint64_t g = 0; g < end; g++) {
        data->seen[g] = data->counted_by[g] != 0;
    }
    for (uint32_t i = 0; i < data->lease_count; i++) {
        const struct sy_lease *lease = &data->leases[i];
        if (lease->state == SY_LEASE_HELD) {
            see(world, lease->first + lease->counted, lease->count - lease->counted, "leased");
        }
    }
    for (uint32_t i = 0; i < data->range_count; i++) {
        see(world, data->ranges[i].first, data->ranges[i].count, "queued");
    }
    for (uint64_t g = 0; g < end; g++) {
        if (data->seen[g] == 0) {
            sim_fail(world, "position %llu of the data is lost", (unsigned long long)g);
            return;
        }
    }
}

static bool grow_leases(struct sim_data *data, uint64_t count)
{
    if (count > data->lease_capacity) {
        uint32_t capacity = (uint32_t)DL_MAX(2 * count, 64);
        struct sy_lease *grown = realloc(data->leases, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        data->leases = grown;
        data->lease_capacity = capacity;
    }
    return true;
}

static void write_lease(struct sim_world *world, const struct sy_lease *lease)
{
    struct sim_data *data = &world->data;
    if (lease->lease > data->lease_count + 1 || !grow_leases(data, lease->lease)) {
        sim_fail(world, "lease %llu follows %u", (unsigned long long)lease->lease, data->lease_count);
        return;
    }
    bool fresh = lease->lease == data->lease_count + 1;
    struct sy_lease *at = &data->leases[lease->lease - 1];
    if (!fresh && (lease->state != SY_LEASE_RETURNED || at->state != SY_LEASE_HELD || lease->counted != at->counted)) {
        sim_fail(world, "lease %llu was %s and becomes %s", (unsigned long long)lease->lease,
                 sy_lease_state_name(at->state), sy_lease_state_name(lease->state));
    }
    world->counts.leases += fresh ? 1 : 0;
    world->counts.returns += lease->state == SY_LEASE_RETURNED ? 1 : 0;
    *at = *lease;
    data->lease_count += fresh ? 1 : 0;
}

static void write_changes(struct sim_world *world, struct sim_ledger_job *job)
{
    struct sim_data *data = &world->data;
    for (uint32_t i = 0; i < job->changes.lease_count; i++) {
        write_lease(world, &job->changes.leases[i]);
    }
    if (job->changes.ranges_changed) {
        free(data->ranges);
        data->ranges = (struct sy_range *)(uintptr_t)dl_take(job->changes.ranges);
        data->range_count = job->changes.range_count;
    }
    check(world);
}

static void *copy(const void *from, size_t count, size_t size)
{
    void *to = malloc(count * size + 1);
    if (to != NULL && count > 0) {
        memcpy(to, from, count * size);
    }
    return to;
}

static void free_job(struct sim_ledger_job *job)
{
    free((void *)(uintptr_t)job->changes.leases);
    free((void *)(uintptr_t)job->changes.ranges);
    free(job);
}

void sim_data_write(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    struct sim_ledger_job *job = calloc(1, sizeof *job);
    struct sy_ledger_changes changes;
    sy_core_ledger_changes(syncer->core, &changes);
    if (job == NULL) {
        sim_fail(world, "no memory for the data");
        return;
    }
    job->ticket = ++syncer->tickets;
    job->changes = changes;
    job->changes.leases = copy(changes.leases, changes.lease_count, sizeof *changes.leases);
    job->changes.ranges = copy(changes.ranges, changes.range_count, sizeof *changes.ranges);
    if (syncer->ledger_jobs == NULL) {
        syncer->ledger_jobs = job;
    } else {
        syncer->ledger_last->next = job;
    }
    syncer->ledger_last = job;
    int64_t commit_ns = sim_ns(sim_uniform(&world->rng, 0, world->faults.commit_seconds));
    sim_at(world, world->now_ns + commit_ns, SIM_LEDGER, shard, 0, syncer->epoch, NULL);
}

void sim_data_durable(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    struct sim_ledger_job *job = syncer->ledger_jobs;
    bool full = sim_chance(world, world->faults.full_disk_share);
    world->counts.full_disks += full ? 1 : 0;
    if (full || !sim_syncer_writes(world, shard, job->ticket)) {
        int64_t again_ns = world->now_ns + SIM_SECOND / (full ? 1 : 1000);
        sim_at(world, again_ns, SIM_LEDGER, shard, 0, syncer->epoch, NULL);
        return;
    }
    syncer->ledger_jobs = job->next;
    write_changes(world, job);
    sy_core_on_ledger_durable(syncer->core, world->now_ns, job->changes.serial);
    free_job(job);
    sim_syncer_settle(world, shard);
}

void sim_data_forget_jobs(struct sim_syncer *syncer)
{
    while (syncer->ledger_jobs != NULL) {
        struct sim_ledger_job *job = syncer->ledger_jobs;
        syncer->ledger_jobs = job->next;
        free_job(job);
    }
}

/* --- what a durable merge counts --------------------------------------------------------------------------------- */

static void count_lease(struct sim_world *world, uint32_t incarnation, struct sy_lease *lease, uint64_t upto)
{
    struct sim_data *data = &world->data;
    for (; lease->counted < DL_MIN(upto, lease->count); lease->counted++) {
        uint64_t position = lease->first + lease->counted;
        if (data->counted_by[position] != 0) {
            sim_fail(world, "position %llu of the data is counted twice", (unsigned long long)position);
        }
        if (!has_trained_on(&world->incarnations[incarnation], lease->lease, position)) {
            sim_fail(world, "position %llu of the data is counted for one that has not trained on it",
                     (unsigned long long)position);
        }
        data->counted_by[position] = incarnation + 1;
        world->counts.counted++;
    }
    lease->state = lease->counted == lease->count ? SY_LEASE_COUNTED : lease->state;
}

void sim_data_count(struct sim_world *world, uint64_t nonce, const struct dl_wire_push *push)
{
    struct sim_data *data = &world->data;
    uint32_t incarnation = 0;
    while (incarnation < world->incarnation_count && world->incarnations[incarnation].nonce != nonce) {
        incarnation++;
    }
    bool known = push->lease == 0;
    for (uint32_t i = 0; push->lease > 0 && i < data->lease_count; i++) {
        struct sy_lease *lease = &data->leases[i];
        if (lease->nonce != nonce || lease->lease > push->lease) {
            continue;
        }
        known = known || (lease->lease == push->lease && lease->state != SY_LEASE_RETURNED);
        if (lease->state == SY_LEASE_HELD) {
            count_lease(world, incarnation, lease, lease->lease < push->lease ? lease->count : push->cursor);
        }
    }
    if (!known) {
        sim_fail(world, "a push was merged whose lease %llu is another's", (unsigned long long)push->lease);
    }
    check(world);
}

/* --- a restart --------------------------------------------------------------------------------------------------- */

void sim_data_restore(struct sim_world *world, uint32_t shard)
{
    struct sim_data *data = &world->data;
    if (shard != 0) {
        return;
    }
    struct sy_ledger_state state = {.leases = data->leases,
                                    .lease_count = data->lease_count,
                                    .ranges = data->ranges,
                                    .range_count = data->range_count,
                                    .next_lease = data->lease_count + 1,
                                    .positions = high_water(data)};
    for (uint32_t i = 0; i < data->lease_count; i++) {
        state.counted += data->leases[i].counted;
    }
    struct dl_err err;
    if (sy_core_restore_ledger(world->syncers[0].core, &state, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
    }
}

void sim_data_release(struct sim_world *world)
{
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        free(world->incarnations[i].taken);
    }
    free(world->data.leases);
    free(world->data.ranges);
    free(world->data.counted_by);
    free(world->data.seen);
}
