/* The learner's store, boundary after boundary, against arithmetic written out an element at a time: what a push carries, what an
 * update makes of tensors and base copy, what seeds, hashes and peers get of it; to the bit, for every codec on either way. */
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/unit.h"
#include "worker/link/store.h"

#define TENSORS 3
#define FRAGMENTS 2
#define ROUNDS 4
#define GUARD 16

/* No multiple of a block or a line anywhere, so that slices begin and end within them. */
static const struct dl_tensor declared[TENSORS] = {
    {.name = "embed", .role = DL_TENSOR_EMBEDDING, .rank = 2, .shape = {61, 97}},
    {.name = "w", .rank = 2, .shape = {53, 67}, .layer = 1},
    {.name = "norm", .rank = 1, .shape = {67}, .layer = 2},
};

static struct dl_layout *layout;
static struct wk_store *store;
static struct dl_rng rng;
static float *memory[TENSORS], *tensors[TENSORS];         /* The store's; between guards. */
static float *theta[FRAGMENTS], *base[FRAGMENTS], *spare; /* What they should be, as padded arrays. */
static uint8_t *pushed[FRAGMENTS], *update, *encoded;     /* The last push of each; the last update; anything. */
static enum dl_codec base_codec[FRAGMENTS];               /* As what the base copy came. */

static uint64_t elements_of(uint32_t p)
{
    return layout->fragments[p].padded_elements;
}

static float *new_array(void)
{
    float *array = calloc(layout->padded_elements_max, sizeof *array);
    CU_ASSERT_PTR_NOT_NULL_FATAL(array);
    return array;
}

static void begin(void)
{
    dl_rng_init(&rng, 3, dl_rng_stream("store", 0, 0));
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(declared, TENSORS, FRAGMENTS, DL_LAYOUT_BALANCED, &layout, NULL), DL_OK);
    for (int t = 0; t < TENSORS; t++) {
        uint64_t count = dl_tensor_elements(&declared[t]);
        memory[t] = malloc((count + 2 * GUARD) * sizeof(float));
        CU_ASSERT_PTR_NOT_NULL_FATAL(memory[t]);
        memset(memory[t], 0xa5, (count + 2 * GUARD) * sizeof(float));
        tensors[t] = memory[t] + GUARD;
        for (uint64_t i = 0; i < count; i++) {
            tensors[t][i] = dl_rng_normal(&rng);
        }
    }
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        theta[p] = new_array();
        base[p] = new_array();
        pushed[p] = (uint8_t *)new_array();
        base_codec[p] = DL_CODEC_NONE;
        dl_layout_gather(layout, p, tensors, theta[p]);
        dl_layout_gather(layout, p, tensors, base[p]);
    }
    spare = new_array();
    update = (uint8_t *)new_array();
    encoded = (uint8_t *)new_array();
    store = wk_store_new(tensors, TENSORS);
    CU_ASSERT_PTR_NOT_NULL_FATAL(store);
    CU_ASSERT_EQUAL_FATAL(wk_store_prepare(store, layout, NULL), DL_OK);
}

static void end(void)
{
    wk_store_free(store);
    for (int t = 0; t < TENSORS; t++) {
        free(memory[t]);
    }
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        free(theta[p]);
        free(base[p]);
        free(pushed[p]);
    }
    free(spare);
    free(update);
    free(encoded);
    dl_layout_free(layout);
}

/* Tensors are what they should be, and nothing beside them was written. */
static void check_tensors(void)
{
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        memset(spare, 0, elements_of(p) * sizeof(float));
        dl_layout_gather(layout, p, tensors, spare);
        CU_ASSERT_FATAL(unit_same_bits(spare, theta[p], elements_of(p) * sizeof(float)));
    }
    for (int t = 0; t < TENSORS; t++) {
        const uint8_t *before = (const uint8_t *)memory[t];
        const uint8_t *after = before + (GUARD + dl_tensor_elements(&declared[t])) * sizeof(float);
        for (size_t i = 0; i < GUARD * sizeof(float); i++) {
            CU_ASSERT_FATAL(before[i] == 0xa5 && after[i] == 0xa5);
        }
    }
}

/* The base copy, in every way in which it is shown. */
static void check_base(void)
{
    uint64_t hash = 0;
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        hash ^= dl_hash64(base[p], elements_of(p) * sizeof(float), p);
        for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
            uint64_t bytes = dl_codec_bytes((enum dl_codec)codec, elements_of(p));
            wk_store_encode_base(store, p, (enum dl_codec)codec, encoded);
            dl_codec_encode((enum dl_codec)codec, base[p], elements_of(p) / DL_BLOCK, (uint8_t *)spare);
            /* As it came, where it came so: an encoder need not find the same bytes again for quantised values. */
            bool is_again = (enum dl_codec)codec == base_codec[p] && codec >= DL_CODEC_INT8;
            CU_ASSERT_FATAL(is_again || unit_same_bits(encoded, spare, bytes));
        }
    }
    CU_ASSERT_EQUAL_FATAL(wk_store_hash(store), hash);
}

static void train(void)
{
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        for (uint32_t s = 0; s < layout->fragments[p].slice_count; s++) {
            const struct dl_slice *slice = &layout->slices[layout->fragments[p].first_slice + s];
            for (uint64_t i = 0; i < slice->count; i++) {
                float step = dl_rng_normal(&rng) * 1e-2f;
                tensors[slice->tensor][slice->tensor_offset + i] += step;
                theta[p][slice->fragment_offset + i] += step;
            }
        }
    }
}

/* A push is the encoded difference, and decodes to what the syncer and a rebase take it for. */
static void push(uint32_t p, enum dl_codec codec)
{
    const struct wk_step step = {.type = WK_STEP_SNAPSHOT, .fragment = p, .codec = codec};
    for (uint64_t i = 0; i < elements_of(p); i++) {
        spare[i] = base[p][i] - theta[p][i];
    }
    dl_codec_encode(codec, spare, elements_of(p) / DL_BLOCK, pushed[p]);
    CU_ASSERT_EQUAL_FATAL(wk_store_snapshot(store, &step, NULL), DL_OK);
    CU_ASSERT_FATAL(unit_same_bits(wk_store_push(store, p, false), pushed[p], dl_codec_bytes(codec, elements_of(p))));
}

/* A syncer's next version, into `update`; its values into the reference's base once `next` has been made of them. */
static void make_update(uint32_t p, enum dl_codec codec)
{
    memset(spare, 0, elements_of(p) * sizeof(float));
    for (uint32_t s = 0; s < layout->fragments[p].slice_count; s++) {
        const struct dl_slice *slice = &layout->slices[layout->fragments[p].first_slice + s];
        for (uint64_t i = 0; i < slice->count; i++) {
            spare[slice->fragment_offset + i] = dl_rng_normal(&rng);
        }
    }
    dl_codec_encode(codec, spare, elements_of(p) / DL_BLOCK, update);
    dl_codec_decode(codec, update, elements_of(p) / DL_BLOCK, spare);
}

static void expect_applied(uint32_t p, const struct wk_step *step)
{
    float *delta = (float *)(void *)encoded;
    dl_codec_decode(step->push_codec, pushed[p], elements_of(p) / DL_BLOCK, delta);
    for (uint64_t i = 0; i < elements_of(p); i++) {
        float next = spare[i], now = theta[p][i];
        if (step->rebase) {
            next += now - (base[p][i] - delta[i]);
        }
        theta[p][i] = step->alpha > 0 ? step->alpha * now + (1.0f - step->alpha) * next : next;
        base[p][i] = spare[i];
    }
    base_codec[p] = step->codec;
}

static void apply(const struct wk_step *step)
{
    uint32_t p = step->fragment;
    uint64_t bytes = dl_codec_bytes(step->codec, elements_of(p));
    make_update(p, step->codec);
    uint8_t *slot = wk_store_slot(store, p, step->slot, bytes);
    CU_ASSERT_PTR_NOT_NULL_FATAL(slot);
    memcpy(slot, update, bytes);
    expect_applied(p, step);
    wk_store_apply(store, step);
}

static void rounds(enum dl_codec up, enum dl_codec down, bool rebase, float alpha)
{
    begin();
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t p = 0; p < FRAGMENTS; p++) {
            train();
            push(p, up);
            train();
            const struct wk_step step = {.type = WK_STEP_APPLY,
                                         .fragment = p,
                                         .slot = round % 3 == 2, /* Now and then the other one. */
                                         .codec = down,
                                         .alpha = alpha,
                                         .rebase = rebase,
                                         .push_codec = up};
            apply(&step);
            check_tensors();
            check_base();
        }
    }
    end();
}

static void test_every_codec_and_way_to_apply(void)
{
    for (int up = DL_CODEC_NONE; up <= DL_CODEC_INT4; up++) {
        for (int down = DL_CODEC_NONE; down <= DL_CODEC_INT4; down++) {
            rounds((enum dl_codec)up, (enum dl_codec)down, false, 0);
            rounds((enum dl_codec)up, (enum dl_codec)down, true, 0);
            rounds((enum dl_codec)up, (enum dl_codec)down, false, 0.25f);
            rounds((enum dl_codec)up, (enum dl_codec)down, true, 0.5f);
        }
    }
}

static void expect_seed(uint32_t p)
{
    const uint8_t *seed = wk_store_push(store, p, true);
    CU_ASSERT_PTR_NOT_NULL_FATAL(seed);
    CU_ASSERT(unit_same_bits(seed, base[p], elements_of(p) * sizeof(float)));
    CU_ASSERT_PTR_EQUAL(wk_store_push(store, p, true), seed); /* Chunk after chunk. */
}

/* Before any update, and for a syncer that lost its state after some: each time the values of that time. */
static void test_seeds(void)
{
    for (int down = DL_CODEC_NONE; down <= DL_CODEC_BF16; down++) {
        begin();
        expect_seed(0);
        for (uint32_t round = 0; round < ROUNDS; round++) {
            const struct wk_step step = {.type = WK_STEP_APPLY, .codec = (enum dl_codec)down};
            train();
            apply(&step);
            expect_seed(0);
            expect_seed(1);
            train();
            push(0, DL_CODEC_INT4); /* In the memory in which a seed may lie. */
            expect_seed(0);
        }
        end();
    }
}

/* A peer's fragments, one after the other through the same memory. */
static void test_adopted_memory_changes_places(void)
{
    begin();
    struct wk_memory staging = {.bytes = NULL};
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t p = 0; p < FRAGMENTS; p++) {
            const struct wk_step step = {.codec = DL_CODEC_BF16};
            make_update(p, DL_CODEC_BF16);
            expect_applied(p, &step);
            uint64_t bytes = dl_codec_bytes(DL_CODEC_BF16, elements_of(p));
            CU_ASSERT_PTR_NOT_NULL_FATAL(wk_memory_grow(&staging, bytes));
            memcpy(staging.bytes, update, bytes);
            wk_store_adopt(store, p, DL_CODEC_BF16, &staging);
            CU_ASSERT_PTR_NOT_NULL(staging.bytes); /* The base copy's, of before. */
            check_tensors();
            check_base();
        }
    }
    free(staging.bytes);
    train();
    push(0, DL_CODEC_INT8);
    push(1, DL_CODEC_NONE);
    end();
}

UNIT_MAIN("link_store", {"every codec and way to apply", test_every_codec_and_way_to_apply}, {"seeds", test_seeds},
          {"adopted memory", test_adopted_memory_changes_places})
