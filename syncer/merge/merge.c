#include "syncer/merge/merge.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/isa.h"
#include "common/mem.h"
#include "syncer/merge/kernels.h"

/* A tile and its sums stay in the first-level cache; tiles start anew at each slice, so that norms add up in the same
 * order however the tiles are shared out. */
#define TILE_BLOCKS 16
#define TILE (TILE_BLOCKS * DL_BLOCK)
/* Results of fragments larger than this go past the caches, which could not hold them anyway. */
#define STREAM_ELEMENTS_MIN (1024 * 1024)

struct slice_plan {
    const struct dl_slice *slice;
    uint64_t first_tile, tile_count;
    bool is_rda;
    bool is_mean_of_rda; /* Falls back to the mean in the second pass. */
    float gain;          /* The outer gradient is gain * the summed tile. */
    double radius;       /* sum w |x| / sum w */
    double reach;        /* Length that the mean direction would have if all agreed. */
    float *factors;      /* One a push. */
};

struct sy_merge {
    const struct dl_layout *layout;
    struct sy_pool *pool;
    uint32_t pushes_max;
    struct slice_plan *slices;
    float *factors;   /* Rows of pushes_max, one a slice. */
    double *partials; /* A tile's sum of squares: of the gradient, or of the mean direction. */
};

struct run { /* One call of sy_merge_run, shared read-only by the threads; each writes its own tiles and partials. */
    const struct sy_merge *merge;
    const struct sy_merge_job *job;
    const struct sy_merge_kernels *kernels;
    sy_outer_fn outer;
    struct sy_outer_factors outer_factors;
    float *directions; /* Where the first pass leaves mean directions. */
    uint32_t slice_count;
    bool streams;
};

struct tile {
    const struct slice_plan *plan;
    uint64_t index;
    uint64_t offset; /* Elements from the fragment's start. */
    size_t blocks;
    size_t elements; /* Without the slice's gap. */
};

static const struct sy_merge_kernels *kernels(void)
{
    return DL_ISA_PICK(&sy_merge_portable, &sy_merge_avx2, &sy_merge_avx512);
}

static uint64_t tiles_of(const struct dl_slice *slice)
{
    return (slice->count + TILE - 1) / TILE;
}

/* --- tiles --- */

static const struct slice_plan *find_plan(const struct run *run, uint64_t tile)
{
    uint32_t low = 0;
    uint32_t high = run->slice_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (run->merge->slices[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &run->merge->slices[low];
}

static struct tile tile_at(const struct slice_plan *plan, uint64_t index)
{
    uint64_t within = (index - plan->first_tile) * TILE;
    uint64_t elements = DL_MIN(plan->slice->count - within, TILE);
    return (struct tile){.plan = plan,
                         .index = index,
                         .offset = plan->slice->fragment_offset + within,
                         .blocks = (size_t)((elements + DL_BLOCK - 1) / DL_BLOCK),
                         .elements = (size_t)elements};
}

/* Where an element lies in Theta, old and new. */
static size_t place(const struct run *run, uint64_t offset)
{
    uint64_t piece = run->job->piece_elements;
    return (size_t)(piece == 0 ? offset : offset + offset / piece * run->job->gap_elements);
}

/* Takes from the front of `rest` what lies in one piece of Theta. */
static struct tile take_part(const struct run *run, struct tile *rest)
{
    uint64_t piece = run->job->piece_elements;
    struct tile part = *rest;
    if (piece != 0) {
        part.blocks = (size_t)DL_MIN(rest->blocks, (piece - rest->offset % piece) / DL_BLOCK);
        part.elements = DL_MIN(rest->elements, part.blocks * DL_BLOCK);
    }
    rest->offset += part.blocks * DL_BLOCK;
    rest->blocks -= part.blocks;
    rest->elements -= part.elements;
    return part;
}

/* values = sum over pushes of factor * delta, in the pushes' order; neighbours of equal codec are read side by side. */
static void sum_pushes(const struct run *run, const struct tile *tile, float *values, const float *const *ahead)
{
    const struct sy_push *pushes = run->job->pushes;
    const float *factors = tile->plan->factors;
    const uint8_t *sources[SY_GROUP_MAX];
    float taken[SY_GROUP_MAX];
    bool adds = false;
    for (uint32_t m = 0; m < run->job->push_count;) {
        enum dl_codec codec = pushes[m].codec;
        size_t at = (size_t)dl_codec_bytes(codec, tile->offset);
        uint32_t count = 0;
        for (; m < run->job->push_count && count < SY_GROUP_MAX && pushes[m].codec == codec; m++) {
            if (factors[m] != 0.0f) {
                sources[count] = pushes[m].encoded + at;
                taken[count++] = factors[m];
            }
        }
        if (count > 0) {
            run->kernels->accumulate[codec](values, sources, taken, count, tile->blocks, adds, adds ? NULL : ahead);
            adds = true;
        }
    }
    if (!adds) {
        memset(values, 0, tile->blocks * DL_BLOCK * sizeof *values);
    }
}

static double sum_squares(const float *values, size_t blocks)
{
    return dl_codec_sum_squares(DL_CODEC_NONE, (const uint8_t *)values, blocks, 0);
}

static void store(const struct run *run, float *to, const float *values, size_t blocks)
{
    if (run->streams) {
        run->kernels->stream(to, values, blocks);
    } else {
        memcpy(to, values, blocks * DL_BLOCK * sizeof *values);
    }
}

static float *at_or_null(float *array, uint64_t offset)
{
    return array == NULL ? NULL : array + offset;
}

static void clear_gap(float *array, const struct tile *part)
{
    if (array != NULL) {
        memset(array + part->elements, 0, (part->blocks * DL_BLOCK - part->elements) * sizeof *array);
    }
}

/* The outer step: values holds the gradient (but for the gain) and then the new Theta. */
static void step(const struct run *run, const struct tile *part, float *values)
{
    const struct sy_outer_state *outer = run->job->outer;
    float *first = at_or_null(outer->first, part->offset);
    float *second = at_or_null(outer->second, part->offset);
    run->outer(&run->outer_factors, part->plan->gain, run->job->theta + place(run, part->offset), values, first, second,
               part->blocks);
    /* A learner's gap may hold anything; ours holds zeros, so that hashes of equal parameters are equal. */
    clear_gap(values, part);
    clear_gap(first, part);
    clear_gap(second, part);
    if (run->job->emit != NULL) {
        run->job->emit(run->job->context, part->offset, values, part->blocks);
    }
}

static void merge_and_step(const struct run *run, const struct tile *tile)
{
    _Alignas(64) float values[TILE];
    const struct sy_outer_state *outer = run->job->outer;
    const float *ahead[SY_AHEAD] = {run->job->theta + place(run, tile->offset), at_or_null(outer->first, tile->offset),
                                    at_or_null(outer->second, tile->offset)};
    sum_pushes(run, tile, values, ahead);
    run->merge->partials[tile->index] = sum_squares(values, tile->blocks);
    for (struct tile rest = *tile; rest.blocks > 0;) {
        struct tile part = take_part(run, &rest);
        float *gradient = values + (part.offset - tile->offset);
        float *to = run->job->theta_out + place(run, part.offset);
        step(run, &part, gradient);
        if (run->job->theta_out == run->job->theta) {
            memcpy(to, gradient, part.blocks * DL_BLOCK * sizeof *gradient);
        } else {
            store(run, to, gradient, part.blocks);
        }
    }
}

static void leave_direction(const struct run *run, const struct tile *tile)
{
    _Alignas(64) float values[TILE];
    sum_pushes(run, tile, values, NULL);
    run->merge->partials[tile->index] = sum_squares(values, tile->blocks);
    for (struct tile rest = *tile; rest.blocks > 0;) {
        struct tile part = take_part(run, &rest);
        store(run, run->directions + place(run, part.offset), values + (part.offset - tile->offset), part.blocks);
    }
}

static void step_by_direction(const struct run *run, const struct tile *tile)
{
    for (struct tile rest = *tile; rest.blocks > 0;) {
        struct tile part = take_part(run, &rest);
        size_t at = place(run, part.offset);
        if (run->directions == run->job->theta_out) {
            step(run, &part, run->directions + at);
        } else {
            _Alignas(64) float values[TILE];
            size_t bytes = part.blocks * DL_BLOCK * sizeof *values;
            memcpy(values, run->directions + at, bytes);
            step(run, &part, values);
            memcpy(run->job->theta_out + at, values, bytes);
        }
    }
}

/* Averaged slices are finished here; of the others, the mean direction and its length are left for the second pass. */
static void first_pass(void *context, uint64_t begin, uint64_t end)
{
    const struct run *run = context;
    const struct slice_plan *plan = find_plan(run, begin);
    for (uint64_t index = begin; index < end; index++) {
        plan += index >= plan->first_tile + plan->tile_count;
        struct tile tile = tile_at(plan, index);
        if (plan->is_rda) {
            leave_direction(run, &tile);
        } else {
            merge_and_step(run, &tile);
        }
    }
    run->kernels->fence();
}

static void second_pass(void *context, uint64_t begin, uint64_t end)
{
    const struct run *run = context;
    const struct slice_plan *plan = find_plan(run, begin);
    for (uint64_t index = begin; index < end; index++) {
        plan += index >= plan->first_tile + plan->tile_count;
        struct tile tile = tile_at(plan, index);
        if (!plan->is_rda) {
            continue;
        }
        if (plan->is_mean_of_rda) {
            merge_and_step(run, &tile);
        } else {
            step_by_direction(run, &tile);
        }
    }
    run->kernels->fence();
}

/* Tiles below `end` are final. */
static void tell_ready(void *context, uint64_t end)
{
    const struct run *run = context;
    const struct sy_merge_job *job = run->job;
    const struct slice_plan *last = &run->merge->slices[run->slice_count - 1];
    bool all = end == last->first_tile + last->tile_count;
    job->ready(job->context, all ? run->merge->layout->fragments[job->fragment].padded_elements
                                 : tile_at(find_plan(run, end), end).offset);
}

/* --- factors --- */

static void use_mean(struct slice_plan *plan, const struct sy_merge_job *job, double weight_sum)
{
    for (uint32_t m = 0; m < job->push_count; m++) {
        plan->factors[m] = (float)(job->pushes[m].weight / weight_sum);
    }
    plan->gain = 1.0f;
}

static void use_direction(struct slice_plan *plan, const struct sy_merge_job *job, uint32_t slice, double weight_sum)
{
    for (uint32_t m = 0; m < job->push_count; m++) {
        double share = job->pushes[m].weight / weight_sum;
        double norm = sqrt(job->pushes[m].sum_squares[slice]);
        bool has_direction = norm >= SY_NORM_MIN;
        plan->factors[m] = has_direction ? (float)(share / norm) : 0.0f;
        plan->reach += has_direction ? share : 0.0;
    }
}

static double radius_of(const struct sy_merge_job *job, uint32_t slice, double weight_sum)
{
    double sum = 0;
    for (uint32_t m = 0; m < job->push_count; m++) {
        sum += job->pushes[m].weight / weight_sum * sqrt(job->pushes[m].sum_squares[slice]);
    }
    return sum;
}

static void plan_slices(struct sy_merge *merge, const struct dl_sync_spec *sync, const struct sy_merge_job *job,
                        double weight_sum, bool has_one_learner)
{
    const struct dl_fragment *fragment = &merge->layout->fragments[job->fragment];
    uint64_t tile = 0;
    for (uint32_t s = 0; s < fragment->slice_count; s++) {
        const struct dl_slice *slice = &merge->layout->slices[fragment->first_slice + s];
        enum dl_tensor_role role = merge->layout->tensors[slice->tensor].role;
        enum dl_merge_method method = role == DL_TENSOR_EMBEDDING ? sync->merge.embedding : sync->merge.method;
        struct slice_plan *plan = &merge->slices[s];
        *plan = (struct slice_plan){.slice = slice,
                                    .first_tile = tile,
                                    .tile_count = tiles_of(slice),
                                    .is_rda = method == DL_MERGE_RDA && !has_one_learner,
                                    .radius = radius_of(job, s, weight_sum),
                                    .factors = merge->factors + (size_t)s * merge->pushes_max};
        if (plan->is_rda) {
            use_direction(plan, job, s, weight_sum);
        } else {
            use_mean(plan, job, weight_sum);
        }
        tile += plan->tile_count;
    }
}

static double length_of(const struct sy_merge *merge, const struct slice_plan *plan)
{
    double sum = 0;
    for (uint64_t i = 0; i < plan->tile_count; i++) {
        sum += merge->partials[plan->first_tile + i];
    }
    return sqrt(sum);
}

/* After the first pass: how far each mean direction has to be stretched, or that it has no length. */
static void plan_second_pass(struct sy_merge *merge, const struct sy_merge_job *job, uint32_t slice_count,
                             double weight_sum, struct sy_merge_stats *stats, double *agreement)
{
    for (uint32_t s = 0; s < slice_count; s++) {
        struct slice_plan *plan = &merge->slices[s];
        if (!plan->is_rda) {
            continue;
        }
        double length = length_of(merge, plan);
        if (length > plan->reach * SY_RDA_LENGTH_MIN) {
            plan->gain = (float)(plan->radius / length);
            /* The weighted mean of the cosines between the deltas and their mean direction is that direction's length.
             */
            *agreement += plan->radius * length;
            stats->slices_rda++;
        } else {
            use_mean(plan, job, weight_sum);
            plan->is_mean_of_rda = true;
            stats->slices_fallback += plan->radius > 0;
        }
    }
}

static void fill_stats(const struct sy_merge *merge, uint32_t slice_count, double agreement,
                       struct sy_merge_stats *stats)
{
    double squares = 0;
    double radius_sum = 0;
    for (uint32_t s = 0; s < slice_count; s++) {
        const struct slice_plan *plan = &merge->slices[s];
        radius_sum += plan->radius;
        if (plan->is_rda && !plan->is_mean_of_rda) {
            squares += plan->radius * plan->radius;
        } else {
            double norm = length_of(merge, plan);
            squares += norm * norm;
            agreement += norm;
            stats->slices_mean++;
        }
    }
    stats->gradient_norm = sqrt(squares);
    stats->agreement = radius_sum > 0 ? agreement / radius_sum : 0;
}

/* --- one run --- */

static double power(double base, uint64_t exponent)
{
    double result = 1;
    for (; exponent > 0; exponent >>= 1, base *= base) {
        result *= exponent & 1 ? base : 1;
    }
    return result;
}

static struct sy_outer_factors outer_factors(const struct dl_sync_spec *sync, uint64_t step_number)
{
    double rate = sync->outer.learning_rate;
    double beta1 = sync->outer.momentum;
    double beta2 = sync->outer.beta2;
    struct sy_outer_factors factors = {.rate = (float)rate,
                                       .keep = (float)(1 - rate * sync->outer.weight_decay),
                                       .beta1 = (float)beta1,
                                       .one_less_beta1 = (float)(1 - beta1),
                                       .beta2 = (float)beta2,
                                       .one_less_beta2 = (float)(1 - beta2),
                                       .root_correction = 1,
                                       .epsilon = (float)sync->outer.epsilon};
    if (sync->outer.type == DL_OUTER_ADAMW) {
        factors.rate = (float)(rate / (1 - power(beta1, step_number)));
        factors.root_correction = (float)(1 / sqrt(1 - power(beta2, step_number)));
    }
    return factors;
}

static enum dl_rc check_pushes(const struct sy_merge_job *job, uint32_t slice_count, double *weight_sum, uint32_t *live,
                               struct dl_err *err)
{
    *weight_sum = 0;
    *live = 0;
    for (uint32_t m = 0; m < job->push_count; m++) {
        const struct sy_push *push = &job->pushes[m];
        assert(m == 0 || job->pushes[m - 1].learner < push->learner);
        if (!isfinite(push->weight) || push->weight < 0) {
            return dl_err_set(err, DL_EINVAL, "merge fragment %u: learner %u has weight %g", job->fragment,
                              push->learner, push->weight);
        }
        for (uint32_t s = 0; s < slice_count; s++) {
            if (!isfinite(push->sum_squares[s]) || push->sum_squares[s] < 0) {
                return dl_err_set(err, DL_EINVAL,
                                  "merge fragment %u: learner %u has a sum of squares of %g in slice %u", job->fragment,
                                  push->learner, push->sum_squares[s], s);
            }
        }
        *weight_sum += push->weight;
        *live += push->weight > 0;
    }
    if (*live == 0 || !isfinite(*weight_sum)) {
        return dl_err_set(err, DL_EINVAL, "merge fragment %u: the weights of %u pushes sum to %g", job->fragment,
                          job->push_count, *weight_sum);
    }
    return DL_OK;
}

enum dl_rc sy_merge_run(struct sy_merge *merge, const struct dl_sync_spec *sync, const struct sy_merge_job *job,
                        struct sy_merge_stats *stats, struct dl_err *err)
{
    assert(job->fragment < merge->layout->fragment_count);
    assert(job->push_count >= 1 && job->push_count <= merge->pushes_max);
    assert(((uintptr_t)job->theta_out | (uintptr_t)job->theta | (uintptr_t)job->scratch) % 64 == 0);
    assert(job->piece_elements % DL_BLOCK == 0 && job->gap_elements % 16 == 0);
    uint32_t arrays = sy_outer_arrays(sync->outer.type);
    assert((arrays < 1 || job->outer->first != NULL) && (arrays < 2 || job->outer->second != NULL));
    const struct dl_fragment *fragment = &merge->layout->fragments[job->fragment];
    double weight_sum;
    uint32_t live;
    enum dl_rc rc = check_pushes(job, fragment->slice_count, &weight_sum, &live, err);
    if (rc != DL_OK) {
        return rc;
    }
    plan_slices(merge, sync, job, weight_sum, live == 1);
    const struct slice_plan *last = &merge->slices[fragment->slice_count - 1];
    uint64_t tile_count = last->first_tile + last->tile_count;
    struct run run = {.merge = merge,
                      .job = job,
                      .kernels = kernels(),
                      .outer_factors = outer_factors(sync, job->outer->steps + 1),
                      .directions = job->theta_out == job->theta ? job->scratch : job->theta_out,
                      .slice_count = fragment->slice_count,
                      .streams = fragment->padded_elements >= STREAM_ELEMENTS_MIN};
    run.outer = run.kernels->outer[sync->outer.type];
    bool any_rda = false;
    for (uint32_t s = 0; s < fragment->slice_count; s++) {
        any_rda = any_rda || merge->slices[s].is_rda;
    }
    assert(!any_rda || run.directions != NULL);

    struct sy_merge_stats counted = {0};
    double agreement = 0;
    sy_pool_done_fn tell = job->ready == NULL ? NULL : tell_ready;
    sy_pool_run(merge->pool, first_pass, any_rda ? NULL : tell, &run, tile_count);
    if (any_rda) {
        plan_second_pass(merge, job, fragment->slice_count, weight_sum, &counted, &agreement);
        sy_pool_run(merge->pool, second_pass, tell, &run, tile_count);
    }
    fill_stats(merge, fragment->slice_count, agreement, &counted);
    job->outer->steps++;
    *stats = counted;
    return DL_OK;
}

/* --- its life --- */

uint32_t sy_outer_arrays(enum dl_outer_type type)
{
    switch (type) {
    case DL_OUTER_SGD: return 0;
    case DL_OUTER_NESTEROV:
    case DL_OUTER_LION: return 1;
    case DL_OUTER_ADAMW: return 2;
    }
    assert(!"unknown outer optimiser");
    return 0;
}

enum dl_rc sy_merge_new(const struct dl_layout *layout, struct sy_pool *pool, uint32_t pushes_max,
                        struct sy_merge **out, struct dl_err *err)
{
    assert(pushes_max >= 1 && pushes_max <= DL_SPEC_LEARNERS_MAX);
    uint32_t slices_max = 0;
    uint64_t tiles_max = 0;
    for (uint32_t f = 0; f < layout->fragment_count; f++) {
        const struct dl_fragment *fragment = &layout->fragments[f];
        uint64_t tiles = 0;
        for (uint32_t s = 0; s < fragment->slice_count; s++) {
            tiles += tiles_of(&layout->slices[fragment->first_slice + s]);
        }
        slices_max = DL_MAX(slices_max, fragment->slice_count);
        tiles_max = DL_MAX(tiles_max, tiles);
    }
    struct sy_merge *merge = calloc(1, sizeof *merge);
    if (merge != NULL) {
        *merge = (struct sy_merge){.layout = layout,
                                   .pool = pool,
                                   .pushes_max = pushes_max,
                                   .slices = calloc(slices_max, sizeof *merge->slices),
                                   .factors = calloc((size_t)slices_max * pushes_max, sizeof *merge->factors),
                                   .partials = calloc(tiles_max, sizeof *merge->partials)};
    }
    if (merge == NULL || merge->slices == NULL || merge->factors == NULL || merge->partials == NULL) {
        sy_merge_free(merge);
        return dl_err_set(err, DL_ENOMEM, "no memory to merge %u pushes of %u slices", pushes_max, slices_max);
    }
    *out = merge;
    return DL_OK;
}

void sy_merge_free(struct sy_merge *merge)
{
    if (merge != NULL) {
        free(merge->slices);
        free(merge->factors);
        free(merge->partials);
        free(merge);
    }
}
