/* sy_merge: merges the pushes of a round into a fragment and takes the outer step (ALGORITHM, "Syncer", steps 5 to 8).
 *
 * A push is the encoded delta Theta_p - theta_m,p. Per slice, by its tensor's role and the spec, the deltas are
 * averaged (weighted mean) or merged by radial-directional averaging (RDA); the result is the outer gradient of the
 * optimiser.
 *
 *     mean  g = sum w x / sum w
 *     RDA   g = (sum w |x| / sum w) * phi(sum w phi(x) / sum w),  phi(x) = x / |x|,  phi(0) = 0
 *
 * RDA becomes the mean where the mean direction has no length (below SY_RDA_LENGTH_MIN of what it would have if all
 * agreed), and where one learner alone has weight: then both give x itself.
 *
 * The arithmetic is float32, learners in ascending id; norms are float32 within a block and double over blocks and
 * tiles, in a fixed order. So equal inputs give equal bits on any number of threads and any instruction set. Mean: one
 * pass over the encoded pushes. RDA: one pass that leaves the mean direction in a scratch array, and one over three
 * arrays.
 *
 * Pure but for the pool's threads. A sy_merge is used by one thread at a time. */
#ifndef DL_SYNCER_MERGE_MERGE_H
#define DL_SYNCER_MERGE_MERGE_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"
#include "common/wire.h"
#include "syncer/merge/pool.h"

/* The mean direction of M unrelated deltas has length about 1 / sqrt(M), 0.03 for 1024 of them; rounding leaves about
 * sqrt(M) * 2^-24, 2e-6, where they cancel. */
#define SY_RDA_LENGTH_MIN 0x1p-16
/* A slice's delta with a smaller norm counts as zero: its inverse would not be safe in float32. */
#define SY_NORM_MIN 0x1p-100

struct sy_push {
    uint32_t learner;
    enum dl_codec codec;
    const uint8_t *encoded;    /* dl_codec_bytes(codec, padded_elements of the fragment); any alignment. */
    double weight;             /* >= 0 and finite; see sy_merge_weight. */
    const double *sum_squares; /* One a slice of the fragment, by dl_codec_sum_squares over its blocks; finite. */
};

/* The optimiser's arrays of one fragment, padded_elements each, zero at first. NULL where the optimiser has none. */
struct sy_outer_state {
    float *first;   /* nesterov: momentum; adamw and lion: first moment. */
    float *second;  /* adamw: second moment. */
    uint64_t steps; /* Taken so far; adamw corrects its moments' bias by it. */
};

/* As it is stored: first, second, then this many bytes that begin with `steps` (little-endian). */
#define SY_OUTER_TRAILER_BYTES 64

/* How many of `first` and `second` an optimiser needs: sgd 0, nesterov and lion 1, adamw 2. */
uint32_t sy_outer_arrays(enum dl_outer_type type);

struct sy_merge_job {
    uint32_t fragment;            /* Index in the layout. */
    const struct sy_push *pushes; /* At least 1, strictly ascending by learner id. */
    uint32_t push_count;
    const float *theta; /* Current version. All float arrays: padded_elements, aligned to 64 bytes. */
    float *theta_out;   /* New version; may be `theta`. */
    float *scratch;     /* Needed when theta_out is theta and RDA is used; may else be NULL. */
    /* These three lie in pieces of `piece_elements` (a multiple of DL_BLOCK) with `gap_elements` (a multiple of 16) between
     * them, which are left alone. 0: in one. */
    uint64_t piece_elements, gap_elements;
    struct sy_outer_state *outer; /* Updated in place. */
    /* Given what is final of theta_out while it is in the cache, once each: `blocks` blocks from element `offset` on. From
     * any of the pool's threads, several calls at a time. NULL: nobody is. */
    void (*emit)(void *context, uint64_t offset, const float *values, size_t blocks);
    /* Told in the course of the run, from any of the pool's threads, one call at a time: the first `elements` of theta_out
     * and of the optimiser's arrays are final, visible and emitted. Growing, the last time all of them. NULL: nobody is told. */
    void (*ready)(void *context, uint64_t elements);
    void *context; /* Of both. */
};

struct sy_merge_stats {
    double gradient_norm; /* Of the merged outer gradient. */
    /* How far the learners agree: the mean cosine between their deltas and the merged one, weighted by weight and norm.
     * 1: all point the same way; about 1 / sqrt(M): unrelated. 0 when all deltas are zero. */
    double agreement;
    uint32_t slices_mean, slices_rda;
    uint32_t slices_fallback; /* RDA was wanted, but the mean direction had no length. */
};

struct sy_merge; /* Opaque: tables sized for the layout's fragments and `pushes_max` pushes. */

/* `layout` and `pool` are borrowed for its life. `pushes_max` up to DL_SPEC_LEARNERS_MAX. */
DL_MUST_CHECK enum dl_rc sy_merge_new(const struct dl_layout *layout, struct sy_pool *pool, uint32_t pushes_max,
                                      struct sy_merge **out, struct dl_err *err);
void sy_merge_free(struct sy_merge *merge); /* NULL is fine. */

/* Merges and steps by `sync->merge` and `sync->outer`; sync->outer.momentum is beta1 of adamw and lion; weight decay is
 * decoupled (Theta *= 1 - rate * decay) for every optimiser. Gaps between slices become zero whatever a push holds
 * there. Allocates nothing. DL_EINVAL, with nothing changed, when a weight or a sum of squares is not finite or no
 * weight is positive. */
DL_MUST_CHECK enum dl_rc sy_merge_run(struct sy_merge *merge, const struct dl_sync_spec *sync,
                                      const struct sy_merge_job *job, struct sy_merge_stats *stats, struct dl_err *err);

/* The norm of a whole push: the root of the sum of its slices' sums of squares, in order. Not finite when any is not.
 */
double sy_merge_norm(const double *sum_squares, uint32_t slice_count);

/* Weight of a push: c_tokens * (c_tokens / c_steps), or 1 for equal weighting; times exp(-lambda * staleness),
 * staleness in versions. 0 when c_steps or c_tokens is 0. Equal bits everywhere: it does not use libm's exp. */
double sy_merge_weight(const struct dl_sync_spec *sync, uint32_t c_steps, uint64_t c_tokens, uint64_t staleness);

#endif
