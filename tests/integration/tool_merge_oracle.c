/* Runs codecs and merges on files, for comparison with other implementations (oracle/merge_oracle.py).
 *
 *     merge_oracle encode CODEC IN OUT      IN: float32, whole blocks; OUT: as it travels
 *     merge_oracle decode CODEC IN OUT      the other way
 *     merge_oracle merge SCRIPT OUT         OUT: Theta (padded float32) after each round; statistics on stdout
 *
 * A script is lines of words: tensor NAME weight|embedding ROWS COLUMNS; merge METHOD EMBEDDING; threads N;
 * outer TYPE RATE MOMENTUM BETA2 EPSILON DECAY; theta FILE; push LEARNER CODEC WEIGHT FILE; round (merges the pushes
 * since the last). Codecs, methods and types are numbers as in common/spec.h. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "syncer/merge/merge.h"

#define PUSHES_MAX 64
#define TENSORS_MAX 64
#define FILE_BYTES_MAX (256L * 1024 * 1024)

struct script {
    struct dl_tensor tensors[TENSORS_MAX];
    uint32_t tensor_count;
    struct dl_sync_spec sync;
    uint32_t threads;
    struct dl_layout *layout;
    struct sy_pool *pool;
    struct sy_merge *merge;
    float *theta, *theta_out;
    struct sy_outer_state outer;
    struct sy_push pushes[PUSHES_MAX];
    uint8_t *encoded[PUSHES_MAX];
    double *squares[PUSHES_MAX];
    uint32_t push_count;
};

__attribute__((noreturn)) static void fail(const char *what, const char *on)
{
    fprintf(stderr, "merge_oracle: %s: %s\n", what, on);
    exit(1);
}

static void check(enum dl_rc rc, const struct dl_err *err)
{
    if (rc != DL_OK) {
        fail("refused", err->text);
    }
}

static void *allocate(size_t bytes)
{
    void *memory = dl_alloc_aligned(bytes);
    if (memory == NULL) {
        fail("no memory", "");
    }
    return memory;
}

/* The whole file; aligned, the caller frees. */
static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fail("cannot open", path);
    }
    long bytes = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (bytes < 0 || bytes > FILE_BYTES_MAX || fseek(file, 0, SEEK_SET) != 0) {
        fclose(file);
        fail("has no usable size", path);
    }
    uint8_t *content = allocate((size_t)bytes);
    size_t got = fread(content, 1, (size_t)bytes, file);
    fclose(file);
    if (got != (size_t)bytes) {
        fail("cannot read", path);
    }
    *size = got;
    return content;
}

static void write_all(FILE *file, const void *bytes, size_t size)
{
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fflush(file) != 0) {
        fail("cannot write", "output");
    }
}

static uint64_t to_number(const char *text, uint64_t max)
{
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 10);
    if (end == text || *end != 0 || value > max) {
        fail("not a number in range", text);
    }
    return value;
}

static double to_double(const char *text)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != 0) {
        fail("not a number", text);
    }
    return value;
}

static void convert(bool encodes, enum dl_codec codec, const char *in, const char *out)
{
    size_t size = 0;
    DL_AUTO_FREE uint8_t *content = read_file(in, &size);
    DL_AUTO_FILE FILE *file = fopen(out, "wb");
    size_t block_bytes = dl_codec_block_bytes(codec);
    size_t blocks = size / (encodes ? DL_BLOCK * sizeof(float) : block_bytes);
    size_t out_bytes = blocks * (encodes ? block_bytes : DL_BLOCK * sizeof(float));
    DL_AUTO_FREE uint8_t *converted = allocate(out_bytes);
    if (encodes) {
        dl_codec_encode(codec, (const float *)(const void *)content, blocks, converted);
    } else {
        dl_codec_decode(codec, content, blocks, (float *)(void *)converted);
    }
    write_all(file, converted, out_bytes);
}

/* --- merge --- */

static void on_theta(struct script *script, const char *path)
{
    struct dl_err err;
    check(dl_layout_new(script->tensors, script->tensor_count, 1, DL_LAYOUT_TENSOR, &script->layout, &err), &err);
    check(sy_pool_new(script->threads, &script->pool, &err), &err);
    check(sy_merge_new(script->layout, script->pool, PUSHES_MAX, &script->merge, &err), &err);
    size_t bytes = script->layout->padded_elements_max * sizeof(float);
    size_t size = 0;
    script->theta = (float *)(void *)read_file(path, &size);
    if (size != bytes) {
        fail("is not as long as the padded fragment", path);
    }
    script->theta_out = allocate(bytes);
    script->outer.first = allocate(bytes);
    script->outer.second = allocate(bytes);
}

static void on_push(struct script *script, char *const *words)
{
    uint32_t index = script->push_count;
    enum dl_codec codec = (enum dl_codec)to_number(words[2], DL_CODEC_INT4);
    size_t size = 0;
    if (script->layout == NULL || index == PUSHES_MAX) {
        fail("push before theta, or too many", words[1]);
    }
    script->encoded[index] = read_file(words[4], &size);
    if (size != dl_codec_bytes(codec, script->layout->padded_elements_max)) {
        fail("is not as long as an encoded fragment", words[4]);
    }
    script->squares[index] = allocate(script->layout->slice_count * sizeof(double));
    for (uint32_t s = 0; s < script->layout->slice_count; s++) {
        const struct dl_slice *slice = &script->layout->slices[s];
        script->squares[index][s] =
            dl_codec_sum_squares(codec, script->encoded[index] + dl_codec_bytes(codec, slice->fragment_offset),
                                 (slice->count + DL_BLOCK - 1) / DL_BLOCK, 0);
    }
    script->pushes[index] = (struct sy_push){.learner = (uint32_t)to_number(words[1], UINT32_MAX),
                                             .codec = codec,
                                             .encoded = script->encoded[index],
                                             .weight = to_double(words[3]),
                                             .sum_squares = script->squares[index]};
    script->push_count++;
}

static void drop_pushes(struct script *script)
{
    for (uint32_t m = 0; m < script->push_count; m++) {
        free(script->encoded[m]);
        free(script->squares[m]);
    }
    script->push_count = 0;
}

static int by_learner(const void *a, const void *b)
{
    const struct sy_push *left = a, *right = b;
    return (left->learner > right->learner) - (left->learner < right->learner);
}

static void on_round(struct script *script, FILE *out)
{
    if (script->push_count == 0) {
        fail("a round without pushes", "");
    }
    qsort(script->pushes, script->push_count, sizeof script->pushes[0], by_learner); /* As the core gives them. */
    struct sy_merge_job job = {.pushes = script->pushes,
                               .push_count = script->push_count,
                               .theta = script->theta,
                               .theta_out = script->theta_out,
                               .outer = &script->outer};
    struct sy_merge_stats stats;
    struct dl_err err;
    check(sy_merge_run(script->merge, &script->sync, &job, &stats, &err), &err);
    float *old = script->theta;
    script->theta = script->theta_out;
    script->theta_out = old;
    write_all(out, script->theta, script->layout->padded_elements_max * sizeof(float));
    printf("{\"gradient_norm\": %.17g, \"agreement\": %.17g, \"rda\": %u, \"mean\": %u, \"fallback\": %u}\n",
           stats.gradient_norm, stats.agreement, stats.slices_rda, stats.slices_mean, stats.slices_fallback);
    drop_pushes(script);
}

static void on_tensor(struct script *script, char *const *words)
{
    if (script->tensor_count == TENSORS_MAX) {
        fail("too many tensors", words[1]);
    }
    struct dl_tensor *tensor = &script->tensors[script->tensor_count++];
    tensor->rank = 2;
    tensor->shape[0] = to_number(words[3], UINT32_MAX);
    tensor->shape[1] = to_number(words[4], UINT32_MAX);
    tensor->role = strcmp(words[2], "embedding") == 0 ? DL_TENSOR_EMBEDDING : DL_TENSOR_WEIGHT;
    snprintf(tensor->name, sizeof tensor->name, "%s", words[1]);
}

static void on_outer(struct script *script, char *const *words)
{
    script->sync.outer.type = (enum dl_outer_type)to_number(words[1], DL_OUTER_LION);
    script->sync.outer.learning_rate = to_double(words[2]);
    script->sync.outer.momentum = to_double(words[3]);
    script->sync.outer.beta2 = to_double(words[4]);
    script->sync.outer.epsilon = to_double(words[5]);
    script->sync.outer.weight_decay = to_double(words[6]);
}

static void on_line(struct script *script, char *const *words, int count, FILE *out)
{
    if (strcmp(words[0], "tensor") == 0 && count == 5) {
        on_tensor(script, words);
    } else if (strcmp(words[0], "merge") == 0 && count == 3) {
        script->sync.merge.method = (enum dl_merge_method)to_number(words[1], DL_MERGE_RDA);
        script->sync.merge.embedding = (enum dl_merge_method)to_number(words[2], DL_MERGE_RDA);
    } else if (strcmp(words[0], "threads") == 0 && count == 2) {
        script->threads = (uint32_t)to_number(words[1], SY_POOL_THREADS_MAX);
    } else if (strcmp(words[0], "outer") == 0 && count == 7) {
        on_outer(script, words);
    } else if (strcmp(words[0], "theta") == 0 && count == 2) {
        on_theta(script, words[1]);
    } else if (strcmp(words[0], "push") == 0 && count == 5) {
        on_push(script, words);
    } else if (strcmp(words[0], "round") == 0 && count == 1) {
        on_round(script, out);
    } else {
        fail("a line that is not understood", words[0]);
    }
}

static void run_script(const char *path, const char *out_path)
{
    static struct script script;
    script.threads = 1;
    DL_AUTO_FILE FILE *file = fopen(path, "r");
    DL_AUTO_FILE FILE *out = fopen(out_path, "wb");
    if (file == NULL || out == NULL) {
        fail("cannot open", file == NULL ? path : out_path);
    }
    char line[4096];
    while (fgets(line, sizeof line, file) != NULL) {
        char *words[8];
        int count = 0;
        char *rest = NULL;
        for (char *word = strtok_r(line, " \n", &rest); word != NULL && count < 8;
             word = strtok_r(NULL, " \n", &rest)) {
            words[count++] = word;
        }
        if (count > 0) {
            on_line(&script, words, count, out);
        }
    }
    drop_pushes(&script);
    sy_merge_free(script.merge);
    sy_pool_free(script.pool);
    dl_layout_free(script.layout);
    free(script.theta);
    free(script.theta_out);
    free(script.outer.first);
    free(script.outer.second);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "merge") == 0) {
        run_script(argv[2], argv[3]);
    } else if (argc == 5 && (strcmp(argv[1], "encode") == 0 || strcmp(argv[1], "decode") == 0)) {
        convert(argv[1][0] == 'e', (enum dl_codec)to_number(argv[2], DL_CODEC_INT4), argv[3], argv[4]);
    } else {
        fprintf(stderr, "usage: merge_oracle encode|decode CODEC IN OUT | merge SCRIPT OUT\n");
        return 2;
    }
    return 0;
}
