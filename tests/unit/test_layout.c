/* Layouts: what each kind promises, over models of many shapes; the tensor table against hostile bytes. */
#include <stdlib.h>
#include <string.h>

#include "common/layout.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/unit.h"

#define MODEL_MAX 256

struct model {
    uint32_t count;
    struct dl_tensor tensors[MODEL_MAX];
};

static struct dl_tensor *add(struct model *model, const char *name, int layer, uint64_t rows, uint64_t columns)
{
    struct dl_tensor *tensor = &model->tensors[model->count++];
    *tensor = (struct dl_tensor){.rank = columns == 0 ? 1 : 2, .shape = {rows, columns}, .layer = (uint32_t)layer};
    snprintf(tensor->name, sizeof tensor->name, "%s%d", name, layer);
    return tensor;
}

static void transformer(struct model *model, uint64_t vocabulary, uint64_t width, int layers)
{
    model->count = 0;
    add(model, "embedding.", 0, vocabulary, width)->role = DL_TENSOR_EMBEDDING;
    for (int layer = 1; layer <= layers; layer++) {
        add(model, "attention.norm.", layer, width, 0);
        add(model, "q.", layer, width, width);
        add(model, "k.", layer, width / 4, width);
        add(model, "v.", layer, width / 4, width);
        add(model, "o.", layer, width, width);
        add(model, "ffn.norm.", layer, width, 0);
        add(model, "gate.", layer, width * 8 / 3, width);
        add(model, "up.", layer, width * 8 / 3, width);
        add(model, "down.", layer, width, width * 8 / 3);
    }
    add(model, "norm.", layers + 1, width, 0);
    add(model, "head.", layers + 1, vocabulary, width)->role = DL_TENSOR_EMBEDDING;
}

static struct dl_layout *make(const struct model *model, uint32_t fragments, enum dl_layout_kind kind)
{
    struct dl_layout *layout = NULL;
    struct dl_err err = {0};
    enum dl_rc rc = dl_layout_new(model->tensors, model->count, fragments, kind, &layout, &err);
    if (rc != DL_OK) {
        printf("%s ", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    return layout;
}

/* What holds for every layout: each element is in exactly one slice, slices stand in order and aligned, sums agree. */
static void check_invariants(const struct dl_layout *layout)
{
    uint64_t covered[MODEL_MAX] = {0};
    uint64_t elements = 0;
    uint64_t padded_max = 0;
    uint32_t slices = 0;
    for (uint32_t f = 0; f < layout->fragment_count; f++) {
        const struct dl_fragment *fragment = &layout->fragments[f];
        uint64_t end = 0;
        uint64_t sum = 0;
        CU_ASSERT_EQUAL(fragment->first_slice, slices);
        CU_ASSERT_TRUE(fragment->slice_count > 0);
        for (uint32_t i = 0; i < fragment->slice_count; i++, slices++) {
            const struct dl_slice *slice = &layout->slices[slices];
            const struct dl_tensor *tensor = &layout->tensors[slice->tensor];
            uint64_t row = tensor->rank < 2 ? 1 : tensor->shape[tensor->rank - 1];
            CU_ASSERT_EQUAL(slice->fragment_offset, end);
            CU_ASSERT_EQUAL(slice->tensor_offset % row, 0);
            CU_ASSERT_TRUE(slice->count > 0 && slice->count % row == 0);
            CU_ASSERT_TRUE(slice->tensor_offset + slice->count <= dl_tensor_elements(tensor));
            if (i > 0) {
                const struct dl_slice *before = slice - 1;
                CU_ASSERT_TRUE(
                    before->tensor < slice->tensor ||
                    (before->tensor == slice->tensor && before->tensor_offset + before->count < slice->tensor_offset));
            }
            end += (slice->count + DL_BLOCK - 1) / DL_BLOCK * DL_BLOCK;
            sum += slice->count;
            covered[slice->tensor] += slice->count;
        }
        CU_ASSERT_EQUAL(fragment->padded_elements, end);
        CU_ASSERT_EQUAL(fragment->elements, sum);
        elements += sum;
        padded_max = DL_MAX(padded_max, end);
    }
    CU_ASSERT_EQUAL(slices, layout->slice_count);
    CU_ASSERT_EQUAL(elements, layout->elements);
    CU_ASSERT_EQUAL(padded_max, layout->padded_elements_max);
    /* Slices of a tensor do not overlap (checked by gather and scatter below), so equal sums mean that all is covered.
     */
    for (uint32_t i = 0; i < layout->tensor_count; i++) {
        CU_ASSERT_EQUAL(covered[i], dl_tensor_elements(&layout->tensors[i]));
    }
}

static double imbalance(const struct dl_layout *layout)
{
    uint64_t largest = 0;
    for (uint32_t f = 0; f < layout->fragment_count; f++) {
        largest = DL_MAX(largest, layout->fragments[f].elements);
    }
    return (double)largest * layout->fragment_count / (double)layout->elements - 1;
}

static void test_balanced_is_within_a_few_percent(void)
{
    static const struct {
        uint64_t vocabulary, width;
        int layers;
    } shapes[] = {{256, 128, 5}, {256, 384, 6}, {8192, 640, 10}, {50257, 768, 12}, {256, 96, 3}, {128000, 256, 2}};
    static const uint32_t fragments[] = {1, 2, 3, 8, 24, 48};
    static struct model model;
    double worst = 0;
    for (size_t s = 0; s < DL_COUNT_OF(shapes); s++) {
        transformer(&model, shapes[s].vocabulary, shapes[s].width, shapes[s].layers);
        for (size_t f = 0; f < DL_COUNT_OF(fragments); f++) {
            struct dl_layout *layout = make(&model, fragments[f], DL_LAYOUT_BALANCED);
            check_invariants(layout);
            worst = DL_MAX(worst, imbalance(layout));
            CU_ASSERT_TRUE(imbalance(layout) <= 0.03);
            dl_layout_free(layout);
        }
    }
    printf("(worst %.2f %% over the mean) ", 100 * worst);
}

static void test_other_kinds(void)
{
    static struct model model;
    transformer(&model, 8192, 256, 8);
    for (uint32_t fragments = 1; fragments <= 10; fragments++) {
        struct dl_layout *layer = make(&model, fragments, DL_LAYOUT_LAYER);
        struct dl_layout *strided = make(&model, fragments, DL_LAYOUT_STRIDED);
        struct dl_layout *tensor = make(&model, fragments, DL_LAYOUT_TENSOR);
        check_invariants(layer);
        check_invariants(strided);
        check_invariants(tensor);
        CU_ASSERT_EQUAL(tensor->slice_count, model.count);
        uint32_t last = 0;
        for (uint32_t f = 0; f < fragments; f++) {
            for (uint32_t i = 0; i < strided->fragments[f].slice_count; i++) {
                const struct dl_slice *slice = &strided->slices[strided->fragments[f].first_slice + i];
                CU_ASSERT_EQUAL(model.tensors[slice->tensor].layer % fragments, f);
            }
            /* Consecutive: a fragment starts no earlier than the one before it ended, and shares no layer with it. */
            uint32_t lowest = UINT32_MAX;
            uint32_t highest = 0;
            for (uint32_t i = 0; i < layer->fragments[f].slice_count; i++) {
                uint32_t depth = model.tensors[layer->slices[layer->fragments[f].first_slice + i].tensor].layer;
                lowest = DL_MIN(lowest, depth);
                highest = DL_MAX(highest, depth);
            }
            CU_ASSERT_TRUE(f == 0 ? lowest == 0 : lowest == last + 1);
            last = highest;
        }
        CU_ASSERT_EQUAL(last, 9);
        dl_layout_free(layer);
        dl_layout_free(strided);
        dl_layout_free(tensor);
    }
}

/* Layers of 5, 1, 1, 1, 5 in 3: the best cut is 5 | 1 1 1 | 5. */
static void test_layer_cut_is_the_best(void)
{
    static struct model model;
    model.count = 0;
    static const uint64_t rows[] = {5, 1, 1, 1, 5};
    for (int layer = 0; layer < 5; layer++) {
        add(&model, "t", 10 * layer, rows[layer], 100);
    }
    struct dl_layout *layout = make(&model, 3, DL_LAYOUT_LAYER);
    CU_ASSERT_EQUAL(layout->fragments[0].elements, 500);
    CU_ASSERT_EQUAL(layout->fragments[1].elements, 300);
    CU_ASSERT_EQUAL(layout->fragments[2].elements, 500);
    dl_layout_free(layout);
}

static void test_too_many_fragments_says_what_works(void)
{
    static struct model model;
    model.count = 0;
    add(&model, "a", 0, 3, 1000);
    add(&model, "b", 1, 2, 10);
    static const struct {
        enum dl_layout_kind kind;
        uint32_t largest;
    } cases[] = {{DL_LAYOUT_BALANCED, 5}, {DL_LAYOUT_TENSOR, 2}, {DL_LAYOUT_LAYER, 2}, {DL_LAYOUT_STRIDED, 2}};
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        struct dl_layout *layout = make(&model, cases[i].largest, cases[i].kind);
        check_invariants(layout);
        dl_layout_free(layout);
        layout = NULL;
        struct dl_err err;
        char wanted[32];
        snprintf(wanted, sizeof wanted, "at most %u", cases[i].largest);
        CU_ASSERT_EQUAL(dl_layout_new(model.tensors, model.count, cases[i].largest + 1, cases[i].kind, &layout, &err),
                        DL_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, wanted));
        CU_ASSERT_PTR_NULL(layout);
    }
    struct dl_layout *layout = NULL;
    CU_ASSERT_EQUAL(dl_layout_new(model.tensors, 2, 0, DL_LAYOUT_BALANCED, &layout, NULL), DL_EINVAL);
    CU_ASSERT_EQUAL(dl_layout_new(model.tensors, 2, DL_SPEC_FRAGMENTS_MAX + 1, DL_LAYOUT_BALANCED, &layout, NULL),
                    DL_EINVAL);
    CU_ASSERT_EQUAL(dl_layout_new(model.tensors, 0, 1, DL_LAYOUT_BALANCED, &layout, NULL), DL_EINVAL);
}

/* Random shapes of every rank and every kind: whatever is accepted keeps the invariants, and twice gives equal hashes.
 */
static void test_random_models(void)
{
    static struct model model;
    struct dl_rng rng;
    dl_rng_init(&rng, 11, 0);
    int made = 0;
    for (int round = 0; round < 400; round++) {
        model.count = 1 + (uint32_t)dl_rng_below(&rng, 40);
        for (uint32_t i = 0; i < model.count; i++) {
            struct dl_tensor *tensor = &model.tensors[i];
            *tensor =
                (struct dl_tensor){.rank = (uint32_t)dl_rng_below(&rng, 5), .layer = (uint32_t)dl_rng_below(&rng, 9)};
            snprintf(tensor->name, sizeof tensor->name, "t%llu.%u", (unsigned long long)dl_rng_below(&rng, 100), i);
            for (uint32_t d = 0; d < tensor->rank; d++) {
                tensor->shape[d] = 1 + dl_rng_below(&rng, UINT64_C(1) << dl_rng_below(&rng, 12));
            }
        }
        uint32_t fragments = 1 + (uint32_t)dl_rng_below(&rng, 60);
        enum dl_layout_kind kind = (enum dl_layout_kind)dl_rng_below(&rng, 4);
        struct dl_layout *layout = NULL;
        struct dl_layout *again = NULL;
        if (dl_layout_new(model.tensors, model.count, fragments, kind, &layout, NULL) != DL_OK) {
            continue;
        }
        made++;
        check_invariants(layout);
        CU_ASSERT_EQUAL_FATAL(dl_layout_new(model.tensors, model.count, fragments, kind, &again, NULL), DL_OK);
        CU_ASSERT_EQUAL(layout->hash, again->hash);
        dl_layout_free(layout);
        dl_layout_free(again);
    }
    CU_ASSERT_TRUE(made > 100);
}

/* The hash is part of the protocol: it must not change between builds or machines. */
static void test_hash_is_stable(void)
{
    static struct model model;
    transformer(&model, 256, 64, 2);
    struct dl_layout *layout = make(&model, 4, DL_LAYOUT_BALANCED);
    CU_ASSERT_EQUAL(layout->hash, UINT64_C(0xf0d1514a867fb49d));
    dl_layout_free(layout);
}

static void test_compare_names_the_difference(void)
{
    static struct model model;
    static struct model other;
    static const char *const expected[] = {"is q.2 here and query there",
                                           "v.1: dimension 0 is 16 here and 17",
                                           "k.1 has 2 dim",
                                           "o.1: role",
                                           "head.3 is only here",
                                           "8 fragments here and 7",
                                           "another kind"};
    for (size_t i = 0; i < DL_COUNT_OF(expected); i++) {
        transformer(&model, 256, 64, 2);
        transformer(&other, 256, 64, 2);
        switch (i) {
        case 0: snprintf(other.tensors[11].name, DL_TENSOR_NAME_MAX, "query"); break;
        case 1: other.tensors[4].shape[0] = 17; break;
        case 2: other.tensors[3].rank = 1; break;
        case 3: other.tensors[5].role = DL_TENSOR_EMBEDDING; break;
        case 4: other.count--; break;
        default: break;
        }
        /* In one fragment all kinds give equal slices: only the kind differs. */
        struct dl_layout *ours = make(&model, i == 6 ? 1 : 8, DL_LAYOUT_TENSOR);
        struct dl_layout *theirs =
            i == 6 ? make(&other, 1, DL_LAYOUT_STRIDED) : make(&other, i == 5 ? 7 : 8, DL_LAYOUT_TENSOR);
        struct dl_err err = {0};
        CU_ASSERT_EQUAL(dl_layout_compare(ours, theirs, &err), DL_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, expected[i]));
        CU_ASSERT_EQUAL(dl_layout_compare(ours, ours, &err), DL_OK);
        dl_layout_free(ours);
        dl_layout_free(theirs);
    }
}

/* `bytes` zeroed bytes from the heap, exactly. */
static void *zeroed(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (memory == NULL) {
        abort();
    }
    return memory;
}

/* The first `size` of `bytes`, then zeros up to `capacity`. */
static uint8_t *copy_of(const uint8_t *bytes, size_t size, size_t capacity)
{
    uint8_t *copy = zeroed(capacity);
    for (size_t i = 0; i < size; i++) {
        copy[i] = bytes[i];
    }
    return copy;
}

static void test_gather_and_scatter(void)
{
    static struct model model;
    transformer(&model, 300, 48, 2);
    struct dl_layout *layout = make(&model, 5, DL_LAYOUT_BALANCED);
    float *values[MODEL_MAX];
    float *back[MODEL_MAX];
    float next = 1;
    for (uint32_t i = 0; i < model.count; i++) {
        uint64_t count = dl_tensor_elements(&model.tensors[i]);
        values[i] = zeroed(count * sizeof(float));
        back[i] = zeroed(count * sizeof(float));
        for (uint64_t e = 0; e < count; e++) {
            values[i][e] = next++;
        }
    }
    float *fragment = zeroed((layout->padded_elements_max + 1) * sizeof *fragment);
    for (uint32_t f = 0; f < layout->fragment_count; f++) {
        uint64_t padded = layout->fragments[f].padded_elements;
        memset(fragment, 0xff, (layout->padded_elements_max + 1) * sizeof *fragment);
        dl_layout_gather(layout, f, values, fragment);
        uint64_t zeros = 0;
        for (uint64_t e = 0; e < padded; e++) {
            zeros += fragment[e] == 0;
        }
        CU_ASSERT_EQUAL(zeros, padded - layout->fragments[f].elements);
        CU_ASSERT_NOT_EQUAL(fragment[padded], fragment[padded]); /* The guard is still NaN. */
        dl_layout_scatter(layout, f, fragment, back);
    }
    for (uint32_t i = 0; i < model.count; i++) {
        CU_ASSERT_EQUAL(memcmp(values[i], back[i], dl_tensor_elements(&model.tensors[i]) * sizeof(float)), 0);
        free(values[i]);
        free(back[i]);
    }
    free(fragment);
    dl_layout_free(layout);
}

static void test_invalid_tensors(void)
{
    static struct model model;
    for (int i = 0; i < 8; i++) {
        transformer(&model, 256, 64, 1);
        struct dl_tensor *tensor = &model.tensors[3];
        switch (i) {
        case 0: tensor->name[0] = 0; break;
        case 1: tensor->name[0] = ' '; break;
        case 2: memset(tensor->name, 'x', sizeof tensor->name); break;
        case 3: tensor->rank = DL_TENSOR_RANK_MAX + 1; break;
        case 4: tensor->shape[1] = 0; break;
        case 5: tensor->shape[0] = UINT64_C(1) << 60; break;
        case 6: tensor->role = (enum dl_tensor_role)7; break;
        default: memcpy(tensor->name, model.tensors[5].name, DL_TENSOR_NAME_MAX); break;
        }
        struct dl_layout *layout = NULL;
        uint8_t *bytes = NULL;
        size_t size = 0;
        struct dl_err err = {0};
        CU_ASSERT_EQUAL(dl_layout_new(model.tensors, model.count, 2, DL_LAYOUT_BALANCED, &layout, &err), DL_EINVAL);
        CU_ASSERT_NOT_EQUAL(err.text[0], 0);
        CU_ASSERT_EQUAL(dl_tensors_encode(model.tensors, model.count, &bytes, &size, &err), DL_EINVAL);
    }
}

static void test_table_there_and_back(void)
{
    static struct model model;
    transformer(&model, 256, 64, 4);
    model.tensors[1].rank = 0;
    model.tensors[1].shape[0] = 0;
    struct dl_tensor *back = NULL;
    uint8_t *bytes = NULL;
    size_t size = 0;
    uint32_t count = 0;
    CU_ASSERT_EQUAL_FATAL(dl_tensors_encode(model.tensors, model.count, &bytes, &size, NULL), DL_OK);
    CU_ASSERT_EQUAL_FATAL(dl_tensors_decode(bytes, size, &back, &count, NULL), DL_OK);
    CU_ASSERT_EQUAL(count, model.count);
    for (uint32_t i = 0; i < count; i++) {
        CU_ASSERT_STRING_EQUAL(back[i].name, model.tensors[i].name);
        CU_ASSERT_EQUAL(back[i].layer, model.tensors[i].layer);
        CU_ASSERT_EQUAL(back[i].role, model.tensors[i].role);
        CU_ASSERT_EQUAL(back[i].rank, model.tensors[i].rank);
        CU_ASSERT_EQUAL(memcmp(back[i].shape, model.tensors[i].shape, back[i].rank * sizeof(uint64_t)), 0);
    }
    free(back);
    /* Every cut is refused. Copied to the heap at its exact size, so that reading beyond it shows. */
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *part = copy_of(bytes, cut, cut == 0 ? 1 : cut);
        CU_ASSERT_EQUAL(dl_tensors_decode(part, cut, &back, &count, NULL), DL_EPROTO);
        free(part);
    }
    free(bytes);
}

static void test_table_refuses_hostile_bytes(void)
{
    static struct model model;
    transformer(&model, 256, 64, 1);
    uint8_t *bytes = NULL;
    size_t size = 0;
    CU_ASSERT_EQUAL_FATAL(dl_tensors_encode(model.tensors, model.count, &bytes, &size, NULL), DL_OK);
    struct dl_tensor *back = NULL;
    uint32_t count = 0;
    struct dl_err err;
    uint8_t *longer = copy_of(bytes, size, size + 1);
    CU_ASSERT_EQUAL(dl_tensors_decode(longer, size + 1, &back, &count, &err), DL_EPROTO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "left over"));
    memset(longer + 1, 0xff, 4); /* Four thousand million tensors in some hundred bytes. */
    CU_ASSERT_EQUAL(dl_tensors_decode(longer, size, &back, &count, &err), DL_EPROTO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "4294967295 tensors"));
    longer[0] = 2;
    CU_ASSERT_EQUAL(dl_tensors_decode(longer, size, &back, &count, &err), DL_EPROTO);
    free(longer);
    longer = copy_of(bytes, size, size);
    longer[7] = 0; /* Within the first name. */
    CU_ASSERT_EQUAL(dl_tensors_decode(longer, size, &back, &count, &err), DL_EPROTO);
    free(longer);

    /* Any one byte changed: refused, or a table that is valid and says the same when encoded again. */
    struct dl_rng rng;
    dl_rng_init(&rng, 21, 0);
    int refused = 0;
    for (size_t i = 0; i < size; i++) {
        uint8_t kept = bytes[i];
        bytes[i] ^= (uint8_t)(1 + dl_rng_below(&rng, 255));
        if (dl_tensors_decode(bytes, size, &back, &count, &err) != DL_OK) {
            refused++;
        } else {
            uint8_t *again = NULL;
            size_t again_size = 0;
            CU_ASSERT_EQUAL_FATAL(dl_tensors_encode(back, count, &again, &again_size, NULL), DL_OK);
            CU_ASSERT_EQUAL_FATAL(again_size, size);
            CU_ASSERT_EQUAL(memcmp(again, bytes, size), 0);
            free(again);
            free(back);
        }
        bytes[i] = kept;
    }
    CU_ASSERT_TRUE(refused > 0);
    free(bytes);
}

UNIT_MAIN("layout", {"balanced within a few percent", test_balanced_is_within_a_few_percent},
          {"other kinds", test_other_kinds}, {"layer cut is the best", test_layer_cut_is_the_best},
          {"too many fragments", test_too_many_fragments_says_what_works}, {"random models", test_random_models},
          {"hash is stable", test_hash_is_stable}, {"compare", test_compare_names_the_difference},
          {"gather and scatter", test_gather_and_scatter}, {"invalid tensors", test_invalid_tensors},
          {"table there and back", test_table_there_and_back}, {"hostile table", test_table_refuses_hostile_bytes})
