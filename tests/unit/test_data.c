/* Data: file formats and hostile files, the split, the permutation, learners' orders. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "common/env.h"
#include "common/le.h"
#include "common/mem.h"
#include "tests/unit/unit.h"
#include "worker/data/data_stream.h"
#include "worker/data/dataset.h"
#include "worker/data/dictzip.h"
#include "worker/data/gunzip.h"
#include "worker/data/permutation.h"
#include "worker/data/token_file.h"

#define UNPACKED_MAX (UINT64_C(64) << 20)

static char folder[] = "/tmp/test-data-XXXXXX";
static char paths[16][64];
static uint32_t path_count;

/* A file in the test's folder; its path stays valid until `clean`. */
static const char *write_file(const char *name, const void *bytes, size_t size)
{
    if (path_count == 0) {
        memcpy(folder, "/tmp/test-data-XXXXXX", sizeof folder);
        CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    }
    CU_ASSERT_FATAL(path_count < DL_COUNT_OF(paths));
    char *path = paths[path_count++];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    CU_ASSERT_EQUAL_FATAL(fwrite(bytes, 1, size, file), size);
    CU_ASSERT_EQUAL_FATAL(fclose(file), 0);
    return path;
}

static void clean(void)
{
    for (uint32_t i = 0; i < path_count; i++) {
        unlink(paths[i]);
    }
    path_count = 0;
    rmdir(folder);
}

static uint8_t *pattern(size_t size)
{
    uint8_t *bytes = malloc(size);
    if (bytes == NULL) {
        abort();
    }
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (uint8_t)(i * 31 + i / 251);
    }
    return bytes;
}

/* One gzip member, appended at `*used`; with an extra field, as dictzip writes it, when asked. */
static void pack(const uint8_t *bytes, size_t size, bool with_extra, uint8_t *out, size_t capacity, size_t *used)
{
    static Bytef extra[] = {'R', 'A', 4, 0, 1, 0, 2, 0};
    gz_header header = {.extra = extra, .extra_len = sizeof extra, .os = 3};
    z_stream z = {.next_in = (z_const Bytef *)(uintptr_t)bytes, .avail_in = (uInt)size};
    CU_ASSERT_EQUAL_FATAL(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    if (with_extra) {
        CU_ASSERT_EQUAL_FATAL(deflateSetHeader(&z, &header), Z_OK);
    }
    z.next_out = out + *used;
    z.avail_out = (uInt)(capacity - *used);
    CU_ASSERT_EQUAL_FATAL(deflate(&z, Z_FINISH), Z_STREAM_END);
    *used = capacity - z.avail_out;
    deflateEnd(&z);
}

static void test_text(void)
{
    DL_AUTO_FREE uint8_t *bytes = pattern(1000);
    struct wk_token_file file;
    struct dl_err err;
    const char *path = write_file("a.txt", bytes, 1000);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_AUTO, UNPACKED_MAX, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(file.tokens, 1000);
    CU_ASSERT_FALSE(file.is_unpacked);
    uint32_t tokens[10];
    CU_ASSERT_EQUAL(wk_token_file_read(&file, 990, 10, 256, tokens, &err), DL_OK);
    for (size_t i = 0; i < 10; i++) {
        CU_ASSERT_EQUAL(tokens[i], bytes[990 + i]);
    }
    wk_token_file_close(&file);
    clean();
}

static void test_gzip(void)
{
    enum { SIZE = 300000, ROOM = 400000 };
    DL_AUTO_FREE uint8_t *bytes = pattern(SIZE);
    DL_AUTO_FREE uint8_t *packed = malloc(ROOM);
    size_t used = 0;
    struct wk_token_file file;
    struct dl_err err;
    /* Two members, the first as dictzip writes it, and zeros behind. */
    pack(bytes, 100000, true, packed, ROOM, &used);
    pack(bytes + 100000, SIZE - 100000, false, packed, ROOM, &used);
    memset(packed + used, 0, 100);
    const char *path = write_file("a.dz", packed, used + 100);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, UNPACKED_MAX, &file, &err), DL_OK);
    CU_ASSERT_TRUE(file.is_unpacked);
    CU_ASSERT_EQUAL(file.tokens, SIZE);
    CU_ASSERT_EQUAL(memcmp(file.bytes, bytes, SIZE), 0);
    wk_token_file_close(&file);
    /* Exactly as much as may be held, and one byte less. */
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_AUTO, SIZE + 1, &file, &err), DL_OK);
    wk_token_file_close(&file);
    CU_ASSERT_EQUAL(wk_token_file_open(path, DL_DATA_AUTO, SIZE - 1, &file, &err), DL_ENOMEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "a.dz"));
    clean();
}

enum { CHUNK = 1000, DICTZIP_ROOM = 400000 };

/* As dictzip writes it: chunks that stand alone, their packed sizes in the header. Returns its size. */
static size_t pack_dictzip(const uint8_t *bytes, size_t size, uint8_t *out)
{
    size_t chunks = (size + CHUNK - 1) / CHUNK, extra = 4 + 6 + 2 * chunks;
    uint8_t *at = out;
    const uint8_t head[] = {0x1f,
                            0x8b,
                            8,
                            4 | 8,
                            0,
                            0,
                            0,
                            0,
                            0,
                            3,
                            (uint8_t)extra,
                            (uint8_t)(extra >> 8),
                            'R',
                            'A',
                            (uint8_t)(extra - 4),
                            (uint8_t)((extra - 4) >> 8),
                            1,
                            0,
                            (uint8_t)(CHUNK & 255),
                            CHUNK >> 8,
                            (uint8_t)chunks,
                            (uint8_t)(chunks >> 8)};
    memcpy(at, head, sizeof head);
    uint8_t *sizes = at + sizeof head;
    at = sizes + 2 * chunks;
    memcpy(at, "name", 5);
    at += 5;
    z_stream z = {.next_out = at, .avail_out = DICTZIP_ROOM / 2};
    CU_ASSERT_EQUAL_FATAL(deflateInit2(&z, 6, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY), Z_OK);
    for (size_t i = 0; i < chunks; i++) {
        const uint8_t *before = z.next_out;
        z.next_in = (z_const Bytef *)(uintptr_t)(bytes + i * CHUNK);
        z.avail_in = (uInt)DL_MIN((size_t)CHUNK, size - i * CHUNK);
        CU_ASSERT_EQUAL_FATAL(deflate(&z, Z_FULL_FLUSH), Z_OK);
        size_t packed = (size_t)(z.next_out - before);
        sizes[2 * i] = (uint8_t)packed;
        sizes[2 * i + 1] = (uint8_t)(packed >> 8);
    }
    CU_ASSERT_EQUAL_FATAL(deflate(&z, Z_FINISH), Z_STREAM_END);
    at = z.next_out;
    deflateEnd(&z);
    uint32_t ends[] = {(uint32_t)crc32(0, bytes, (uInt)size), (uint32_t)size};
    memcpy(at, ends, sizeof ends);
    return (size_t)(at + sizeof ends - out);
}

/* By chunks on several threads; whatever is wrong with it is left to the ordinary way, which refuses it. */
static void test_dictzip(void)
{
    enum { SIZE = 100500, SMALL = 2500 };
    DL_AUTO_FREE uint8_t *bytes = pattern(SIZE);
    DL_AUTO_FREE uint8_t *packed = malloc(DICTZIP_ROOM);
    uint8_t *out = NULL;
    size_t used = pack_dictzip(bytes, SIZE, packed), size = 0;
    struct wk_token_file file;
    struct dl_err err;
    CU_ASSERT_TRUE_FATAL(wk_dictzip_unpack(packed, used, SIZE, &out, &size));
    CU_ASSERT_EQUAL_FATAL(size, SIZE);
    CU_ASSERT_EQUAL(memcmp(out, bytes, SIZE), 0);
    free(out);
    CU_ASSERT_FALSE(wk_dictzip_unpack(packed, used, SIZE - 1, &out, &size));
    const char *path = write_file("a.dz", packed, used);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, UNPACKED_MAX, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(file.tokens, SIZE);
    CU_ASSERT_EQUAL(memcmp(file.bytes, bytes, SIZE), 0);
    wk_token_file_close(&file);
    /* Every cut is refused; every flipped byte is, or does no harm. */
    used = pack_dictzip(bytes, SMALL, packed);
    uint32_t refused = 0;
    for (size_t i = 0; i < used; i++) {
        /* On the heap and no larger, so that a sanitizer sees what is read beyond. */
        DL_AUTO_FREE uint8_t *cut = malloc(DL_MAX(i, (size_t)1)), *copy = malloc(used);
        memcpy(cut, packed, i);
        memcpy(copy, packed, used);
        CU_ASSERT_FALSE(wk_dictzip_unpack(cut, i, SIZE, &out, &size));
        copy[i] ^= 0x55;
        if (wk_dictzip_unpack(copy, used, SIZE, &out, &size)) {
            CU_ASSERT(size == SMALL && memcmp(out, bytes, SMALL) == 0);
            free(out);
        } else {
            refused++;
        }
    }
    CU_ASSERT(refused > used / 2);
    clean();
}

/* With a cache one process unpacks for all: the second finds the entry, a changed file is another one, and what cannot
 * be written there is unpacked alone. */
static void test_shared_copy(void)
{
    enum { SIZE = 300000, ROOM = 400000 };
    DL_AUTO_FREE uint8_t *bytes = pattern(SIZE);
    DL_AUTO_FREE uint8_t *packed = malloc(ROOM);
    size_t used = 0;
    struct wk_token_file first, second;
    struct dl_err err;
    pack(bytes, SIZE, false, packed, ROOM, &used);
    const char *path = write_file("a.gz", packed, used);
    char cache[] = "/tmp/diloco-test-cache-XXXXXX", command[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(cache));
    setenv(DL_ENV_CACHE, cache, 1);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, UNPACKED_MAX, &first, &err), DL_OK);
    CU_ASSERT_FALSE(first.is_unpacked);
    /* No room to unpack: it is there already. */
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, 1, &second, &err), DL_OK);
    CU_ASSERT_EQUAL(first.tokens, SIZE);
    CU_ASSERT_EQUAL(second.tokens, SIZE);
    CU_ASSERT_EQUAL(memcmp(first.bytes, bytes, SIZE), 0);
    CU_ASSERT_EQUAL(memcmp(second.bytes, bytes, SIZE), 0);
    wk_token_file_close(&second);
    used = 0;
    pack(bytes, SIZE / 2, false, packed, ROOM, &used);
    path = write_file("a.gz", packed, used);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, UNPACKED_MAX, &second, &err), DL_OK);
    CU_ASSERT_EQUAL(second.tokens, SIZE / 2);
    CU_ASSERT_EQUAL(memcmp(first.bytes, bytes, SIZE), 0);
    wk_token_file_close(&second);
    wk_token_file_close(&first);
    setenv(DL_ENV_CACHE, "/nowhere/at/all", 1);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_TEXT, UNPACKED_MAX, &second, &err), DL_OK);
    CU_ASSERT_TRUE(second.is_unpacked);
    wk_token_file_close(&second);
    unsetenv(DL_ENV_CACHE);
    snprintf(command, sizeof command, "rm -r '%s'", cache);
    CU_ASSERT_EQUAL(system(command), 0);
    clean();
}

/* Every cut of a gzip file, and every flipped byte, is refused or gives the very same content. */
static void test_damaged_gzip(void)
{
    enum { SIZE = 600, ROOM = 2000 };
    DL_AUTO_FREE uint8_t *bytes = pattern(SIZE);
    uint8_t packed[ROOM], broken[ROOM];
    size_t used = 0;
    struct dl_err err;
    uint32_t refused = 0;
    pack(bytes, SIZE, true, packed, ROOM, &used);
    for (size_t cut = 3; cut < used; cut++) {
        uint8_t *out = NULL;
        size_t out_size = 0;
        CU_ASSERT_EQUAL(wk_gunzip("cut", packed, cut, UNPACKED_MAX, &out, &out_size, &err), DL_ECORRUPT);
        free(out);
    }
    for (size_t i = 0; i < used; i++) {
        memcpy(broken, packed, used);
        broken[i] ^= 0x5a;
        uint8_t *out = NULL;
        size_t out_size = 0;
        if (wk_gunzip("flip", broken, used, UNPACKED_MAX, &out, &out_size, &err) == DL_OK) {
            CU_ASSERT_EQUAL_FATAL(out_size, SIZE);
            CU_ASSERT_EQUAL(memcmp(out, bytes, SIZE), 0);
        } else {
            CU_ASSERT_EQUAL(err.rc, DL_ECORRUPT);
            refused++;
        }
        free(out);
    }
    CU_ASSERT(refused > used / 2);
    packed[used] = 'x';
    uint8_t *out;
    size_t out_size;
    CU_ASSERT_EQUAL(wk_gunzip("tail", packed, used + 1, UNPACKED_MAX, &out, &out_size, &err), DL_ECORRUPT);
}

static const char *write_llmc(const char *name, uint32_t magic, uint32_t version, uint32_t promised, uint32_t width,
                              uint32_t held)
{
    uint8_t bytes[WK_LLMC_HEADER_BYTES + 4096] = {0};
    dl_le_put(bytes, magic, 4);
    dl_le_put(bytes + 4, version, 4);
    dl_le_put(bytes + 8, promised, 4);
    for (uint32_t i = 0; i < held; i++) {
        uint8_t token[4];
        dl_le_put(token, 300 + i, 4);
        memcpy(bytes + WK_LLMC_HEADER_BYTES + (size_t)i * width, token, width);
    }
    return write_file(name, bytes, WK_LLMC_HEADER_BYTES + (size_t)held * width);
}

static void test_token_files(void)
{
    struct wk_token_file file;
    struct dl_err err;
    uint32_t tokens[3];
    struct {
        const char *name;
        uint32_t magic, version, width;
    } kinds[] = {{"s.bin", WK_LLMC_MAGIC_U16, WK_LLMC_VERSION_U16, 2},
                 {"l.bin", WK_LLMC_MAGIC_U32, WK_LLMC_VERSION_U32, 4}};
    for (size_t i = 0; i < DL_COUNT_OF(kinds); i++) {
        const char *path = write_llmc(kinds[i].name, kinds[i].magic, kinds[i].version, 100, kinds[i].width, 100);
        CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_AUTO, 0, &file, &err), DL_OK);
        CU_ASSERT_EQUAL(file.tokens, 100);
        CU_ASSERT_EQUAL(wk_token_file_read(&file, 97, 3, 400, tokens, &err), DL_OK);
        CU_ASSERT_EQUAL(tokens[2], 399);
        /* The last token is outside a vocabulary of 399: file and byte are named. */
        CU_ASSERT_EQUAL(wk_token_file_read(&file, 97, 3, 399, tokens, &err), DL_EINVAL);
        char place[32];
        snprintf(place, sizeof place, "byte %u ", WK_LLMC_HEADER_BYTES + 99 * kinds[i].width);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, place));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, kinds[i].name));
        CU_ASSERT_EQUAL(wk_token_file_check(&file, 399, &err), DL_EINVAL);
        CU_ASSERT_EQUAL(wk_token_file_check(&file, 400, &err), DL_OK);
        wk_token_file_close(&file);
        enum dl_data_format other = kinds[i].width == 2 ? DL_DATA_BIN_U32 : DL_DATA_BIN_U16;
        CU_ASSERT_EQUAL(wk_token_file_open(path, other, 0, &file, &err), DL_EINVAL);
    }
    /* Without a header the format has to be told. */
    uint8_t raw[] = {1, 0, 2, 1, 3, 0, 4, 0};
    const char *path = write_file("raw.bin", raw, sizeof raw);
    CU_ASSERT_EQUAL(wk_token_file_open(path, DL_DATA_AUTO, 0, &file, &err), DL_EINVAL);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_BIN_U16, 0, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(file.tokens, 4);
    CU_ASSERT_EQUAL(wk_token_file_read(&file, 1, 1, 65536, tokens, &err), DL_OK);
    CU_ASSERT_EQUAL(tokens[0], 258);
    wk_token_file_close(&file);
    CU_ASSERT_EQUAL_FATAL(wk_token_file_open(path, DL_DATA_BIN_U32, 0, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(file.tokens, 2);
    wk_token_file_close(&file);
    clean();
}

static void test_hostile_files(void)
{
    struct wk_token_file file;
    struct dl_err err;
    const char *empty = write_file("empty", "", 0);
    CU_ASSERT_EQUAL(wk_token_file_open(empty, DL_DATA_AUTO, 0, &file, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "empty"));
    CU_ASSERT_EQUAL(wk_token_file_open("/nowhere/at/all", DL_DATA_AUTO, 0, &file, &err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/nowhere/at/all"));
    CU_ASSERT_EQUAL(wk_token_file_open(folder, DL_DATA_AUTO, 0, &file, &err), DL_EINVAL);
    const char *odd = write_file("odd", "abc", 3);
    CU_ASSERT_EQUAL(wk_token_file_open(odd, DL_DATA_BIN_U16, 0, &file, &err), DL_EINVAL);
    const char *liar = write_llmc("liar.bin", WK_LLMC_MAGIC_U16, WK_LLMC_VERSION_U16, 101, 2, 100);
    CU_ASSERT_EQUAL(wk_token_file_open(liar, DL_DATA_AUTO, 0, &file, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "101"));
    const char *none = write_llmc("none.bin", WK_LLMC_MAGIC_U16, WK_LLMC_VERSION_U16, 0, 2, 100);
    CU_ASSERT_EQUAL(wk_token_file_open(none, DL_DATA_AUTO, 0, &file, &err), DL_EINVAL);
    clean();
}

static void spec_of(struct dl_data_spec *data, struct dl_model_spec *model, double fraction, uint32_t length)
{
    *data = (struct dl_data_spec){.validation_fraction = fraction, .validation_sequences = 5};
    *model = (struct dl_model_spec){.vocab_size = 256, .sequence_length = length};
}

static void add_path(struct dl_data_spec *data, const char *path)
{
    snprintf(data->paths[data->path_count++], DL_SPEC_TEXT_MAX, "%s", path);
}

/* Three files are one stream: every sequence holds what a copy of all bytes says, and none reaches into the tail. */
static void test_dataset(void)
{
    enum { SIZE = 10007 };
    DL_AUTO_FREE uint8_t *bytes = pattern(SIZE);
    struct dl_data_spec data;
    struct dl_model_spec model;
    spec_of(&data, &model, 0.1, 32);
    add_path(&data, write_file("1", bytes, 5000));
    add_path(&data, write_file("2", bytes + 5000, 7));
    add_path(&data, write_file("3", bytes + 5007, 5000));
    struct wk_dataset *dataset = NULL;
    struct wk_dataset_view view;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_dataset_open(&data, &model, 0, &dataset, &err), DL_OK);
    wk_dataset_view(dataset, &view);
    CU_ASSERT_EQUAL(view.tokens, SIZE);
    CU_ASSERT_EQUAL(view.validation_tokens, 1000);
    CU_ASSERT_EQUAL(view.training_sequences, 9007 / 33);
    CU_ASSERT_EQUAL(view.validation_sequences, 5);
    uint32_t tokens[32], targets[32];
    uint64_t end = 0;
    for (uint64_t i = 0; i < view.training_sequences + view.validation_sequences; i++) {
        bool trains = i < view.training_sequences;
        uint32_t v = (uint32_t)(i - (trains ? i : view.training_sequences));
        uint64_t start = trains ? wk_dataset_training_start(dataset, i) : wk_dataset_validation_start(dataset, v);
        CU_ASSERT(start >= end); /* No overlap, in either part or between them. */
        end = start + 33;
        CU_ASSERT(trains ? end <= view.training_tokens : start >= view.training_tokens && end <= SIZE);
        CU_ASSERT_EQUAL((trains ? wk_dataset_training(dataset, i, tokens, targets, &err)
                                : wk_dataset_validation(dataset, v, tokens, targets, &err)),
                        DL_OK);
        bool equal = true;
        for (uint32_t j = 0; j < 32; j++) {
            equal = equal && tokens[j] == bytes[start + j] && targets[j] == bytes[start + j + 1];
        }
        CU_ASSERT_TRUE(equal);
    }
    CU_ASSERT_EQUAL(end, SIZE); /* The last validation sequence ends with the data. */
    wk_dataset_close(dataset);
    clean();
}

static void test_dataset_limits(void)
{
    DL_AUTO_FREE uint8_t *bytes = pattern(66);
    struct dl_data_spec data;
    struct dl_model_spec model;
    struct wk_dataset *dataset = NULL;
    struct wk_dataset_view view;
    struct dl_err err;
    /* 66 tokens are one training and one validation sequence of 33; 65 are too few. */
    spec_of(&data, &model, 0.01, 32);
    add_path(&data, write_file("66", bytes, 66));
    CU_ASSERT_EQUAL_FATAL(wk_dataset_open(&data, &model, 0, &dataset, &err), DL_OK);
    wk_dataset_view(dataset, &view);
    CU_ASSERT_EQUAL(view.training_sequences, 1);
    CU_ASSERT_EQUAL(view.validation_sequences, 1);
    struct wk_data_stream stream;
    wk_data_stream_init(&stream, dataset, 1);
    CU_ASSERT_EQUAL(wk_data_stream_at(&stream, 0), 0);
    CU_ASSERT_EQUAL(wk_data_stream_at(&stream, UINT64_MAX), 0);
    wk_dataset_close(dataset);
    spec_of(&data, &model, 0.01, 32);
    add_path(&data, write_file("65", bytes, 65));
    CU_ASSERT_EQUAL(wk_dataset_open(&data, &model, 0, &dataset, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "66"));
    /* Bytes outside a small vocabulary are found when the data is opened. */
    spec_of(&data, &model, 0.01, 8);
    model.vocab_size = 128;
    add_path(&data, write_file("bytes", bytes, 66));
    CU_ASSERT_EQUAL(wk_dataset_open(&data, &model, 0, &dataset, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "vocabSize"));
    /* All compressed files together count against the maximum. */
    uint8_t packed[1000];
    size_t used = 0;
    pack(bytes, 60, false, packed, sizeof packed, &used);
    spec_of(&data, &model, 0.01, 8);
    add_path(&data, write_file("g1", packed, used));
    add_path(&data, write_file("g2", packed, used));
    CU_ASSERT_EQUAL(wk_dataset_open(&data, &model, 100, &dataset, &err), DL_ENOMEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "g2"));
    CU_ASSERT_EQUAL_FATAL(wk_dataset_open(&data, &model, 122, &dataset, &err), DL_OK);
    wk_dataset_view(dataset, &view);
    CU_ASSERT_EQUAL(view.unpacked_bytes, 120);
    wk_dataset_close(dataset);
    clean();
}

static void test_permutation(void)
{
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 1000, 4096, 65537};
    for (size_t s = 0; s < DL_COUNT_OF(sizes); s++) {
        uint64_t size = sizes[s];
        DL_AUTO_FREE uint8_t *seen = calloc(size, 1);
        struct wk_permutation a, b;
        uint64_t in_place = 0, as_other = 0, hits = 0;
        wk_permutation_init(&a, 7, 0, size);
        wk_permutation_init(&b, 7, 1, size);
        for (uint64_t i = 0; i < size; i++) {
            uint64_t at = wk_permutation_at(&a, i);
            CU_ASSERT_FATAL(at < size);
            hits += seen[at] == 0 ? 1 : 0;
            seen[at] = 1;
            in_place += at == i ? 1 : 0;
            as_other += at == wk_permutation_at(&b, i) ? 1 : 0;
        }
        CU_ASSERT_EQUAL(hits, size); /* A bijection. */
        if (size >= 1000) {          /* And a shuffle: one fixed point is expected, ten practically never happen. */
            CU_ASSERT(in_place < 10);
            CU_ASSERT(as_other < 10);
        }
    }
    /* Neighbours end up far apart: on average a third of the size. */
    struct wk_permutation p;
    wk_permutation_init(&p, 3, 0, 100000);
    double distance = 0;
    for (uint64_t i = 0; i + 1 < 100000; i++) {
        uint64_t x = wk_permutation_at(&p, i), y = wk_permutation_at(&p, i + 1);
        distance += (double)(x > y ? x - y : y - x) / 99999;
    }
    CU_ASSERT(distance > 100000 * 0.32 && distance < 100000 * 0.35);
}

static struct wk_dataset *open_simple(size_t size, uint32_t length)
{
    DL_AUTO_FREE uint8_t *bytes = pattern(size);
    struct dl_data_spec data;
    struct dl_model_spec model;
    struct dl_err err;
    struct wk_dataset *dataset = NULL;
    spec_of(&data, &model, 0.1, length);
    add_path(&data, write_file("simple", bytes, size));
    CU_ASSERT_EQUAL_FATAL(wk_dataset_open(&data, &model, 0, &dataset, &err), DL_OK);
    return dataset;
}

/* J8: an epoch of positions is every training sequence once, whoever takes which; the next epoch has another order. */
static void test_positions(void)
{
    struct wk_dataset *dataset = open_simple(40000, 15);
    struct wk_dataset_view view;
    wk_dataset_view(dataset, &view);
    uint64_t size = view.training_sequences, same = 0;
    DL_AUTO_FREE uint8_t *seen = calloc(size, 1);
    DL_AUTO_FREE uint64_t *first = calloc(size, sizeof *first);
    struct wk_data_stream stream;
    wk_data_stream_init(&stream, dataset, 42);
    for (uint64_t g = 0; g < 3 * size; g++) {
        uint64_t at = wk_data_stream_at(&stream, g);
        CU_ASSERT_FATAL(at < size);
        CU_ASSERT_EQUAL(seen[at], g / size);
        seen[at]++;
        first[g % size] = g < size ? at : first[g % size];
        same += g >= size && first[g % size] == at ? 1 : 0;
    }
    CU_ASSERT(same < 20);
    wk_dataset_close(dataset);
    clean();
}

/* A sequence is a function of seed and position alone: in any order, also far out. */
static void test_any_position(void)
{
    struct wk_dataset *dataset = open_simple(4000, 15);
    struct wk_data_stream stream, other;
    struct dl_err err;
    uint64_t order[900];
    wk_data_stream_init(&stream, dataset, 9);
    CU_ASSERT(stream.order.size < 300); /* So that 900 go over several epochs. */
    for (size_t g = 0; g < DL_COUNT_OF(order); g++) {
        order[g] = wk_data_stream_at(&stream, g);
    }
    wk_data_stream_init(&other, dataset, 9);
    for (size_t g = DL_COUNT_OF(order); g-- > 0;) {
        CU_ASSERT_EQUAL(wk_data_stream_at(&other, g), order[g]);
    }
    uint64_t far = UINT64_C(1) << 61;
    CU_ASSERT_EQUAL(wk_data_stream_at(&stream, far + 7), wk_data_stream_at(&other, far + 7));
    /* Another seed, another order. */
    wk_data_stream_init(&other, dataset, 10);
    uint32_t equal = 0;
    for (size_t g = 0; g < DL_COUNT_OF(order); g++) {
        equal += wk_data_stream_at(&other, g) == order[g] ? 1 : 0;
    }
    CU_ASSERT(equal < 60);
    /* A read is the sequences of its positions, in order. */
    uint32_t tokens[4 * 15], targets[4 * 15], expected[15], expected_targets[15];
    CU_ASSERT_EQUAL(wk_data_stream_read(&stream, 5, 4, tokens, targets, &err), DL_OK);
    for (uint32_t i = 0; i < 4; i++) {
        CU_ASSERT_EQUAL(wk_dataset_training(dataset, order[5 + i], expected, expected_targets, &err), DL_OK);
        CU_ASSERT_EQUAL(memcmp(tokens + 15 * i, expected, sizeof expected), 0);
        CU_ASSERT_EQUAL(memcmp(targets + 15 * i, expected_targets, sizeof expected_targets), 0);
    }
    wk_dataset_close(dataset);
    clean();
}

UNIT_MAIN("data", {"text", test_text}, {"gzip", test_gzip}, {"dictzip", test_dictzip},
          {"shared copy", test_shared_copy}, {"damaged gzip", test_damaged_gzip}, {"token files", test_token_files},
          {"hostile files", test_hostile_files}, {"dataset", test_dataset}, {"dataset limits", test_dataset_limits},
          {"permutation", test_permutation}, {"positions", test_positions}, {"any position", test_any_position})
