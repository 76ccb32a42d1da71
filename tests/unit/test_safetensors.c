/* safetensors: round trips, 16-bit types, and files from people who mean no good. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/atomic_file.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/unit/unit.h"

static char folder[] = "/tmp/unit-safetensors-XXXXXX";
static char path[sizeof folder + 32];

static struct dl_tensor tensor_of(const char *name, uint32_t rank, uint64_t a, uint64_t b)
{
    struct dl_tensor tensor = {.rank = rank, .shape = {a, b}};
    snprintf(tensor.name, sizeof tensor.name, "%s", name);
    return tensor;
}

/* Writes a file from a header text and a number of data bytes (of value 0, 1, 2, ...). */
static void write_raw(const char *header, uint64_t declared, size_t data_bytes)
{
    DL_AUTO_FILE FILE *file = fopen(path, "wb");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fwrite(&declared, sizeof declared, 1, file);
    fwrite(header, 1, strlen(header), file);
    for (size_t i = 0; i < data_bytes; i++) {
        fputc((int)(i & 255), file);
    }
}

static enum dl_rc open_text(const char *header, size_t data_bytes, struct dl_err *err)
{
    struct dl_safetensors *file = NULL;
    write_raw(header, strlen(header), data_bytes);
    enum dl_rc rc = dl_safetensors_open(path, &file, err);
    dl_safetensors_close(file);
    return rc;
}

static uint32_t files_in_folder(void)
{
    DIR *directory = opendir(folder);
    uint32_t count = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        count += entry->d_name[0] != '.';
    }
    closedir(directory);
    return count;
}

static void test_round_trip(void)
{
    struct dl_err err;
    const struct dl_tensor tensors[] = {tensor_of("b.weight", 2, 3, 5), tensor_of("a", 1, 7, 0)};
    float b[15], a[7], back[15];
    for (int i = 0; i < 15; i++) {
        b[i] = (float)i * 0.3f - 2;
        a[i % 7] = 1e30f / (float)(i + 1);
    }
    const float *data[] = {b, a};
    char key[] = "format", value[] = "pt \"quoted\" \\ \n";
    const struct dl_safetensors_pair pair = {key, value};
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_write(path, tensors, data, 2, &pair, 1, &err), DL_OK);
    CU_ASSERT_EQUAL(files_in_folder(), 1);
    struct dl_safetensors *file = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_open(path, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(dl_safetensors_find(file, "c"), -1);
    CU_ASSERT_STRING_EQUAL(dl_safetensors_metadata(file, "format"), value);
    CU_ASSERT_PTR_NULL(dl_safetensors_metadata(file, "other"));
    int64_t index = dl_safetensors_find(file, "b.weight");
    CU_ASSERT_FATAL(index >= 0);
    const struct dl_tensor *found = dl_safetensors_tensor(file, (uint32_t)index);
    CU_ASSERT(found->rank == 2 && found->shape[0] == 3 && found->shape[1] == 5);
    CU_ASSERT_EQUAL(dl_safetensors_read(file, (uint32_t)index, back, &err), DL_OK);
    CU_ASSERT(unit_same_bits(back, b, sizeof b));
    index = dl_safetensors_find(file, "a");
    CU_ASSERT_FATAL(index >= 0);
    CU_ASSERT_EQUAL(dl_safetensors_read(file, (uint32_t)index, back, &err), DL_OK);
    CU_ASSERT(unit_same_bits(back, a, sizeof a));
    dl_safetensors_close(file);
}

static void test_16_bit(void)
{
    static const char header[] = "{\"h\":{\"dtype\":\"F16\",\"shape\":[6],\"data_offsets\":[0,12]},"
                                 "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[12,16]}}";
    static const uint16_t values[] = {0x3C00, 0xC000, 0x0001, 0x8000, 0x7C00, 0x7E00, 0x3F80, 0xC040};
    write_raw(header, strlen(header), 0);
    DL_AUTO_FILE FILE *out = fopen(path, "ab");
    fwrite(values, 1, sizeof values, out);
    fflush(out);
    struct dl_err err;
    struct dl_safetensors *file = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_open(path, &file, &err), DL_OK);
    float h[6], b[2];
    CU_ASSERT_EQUAL(dl_safetensors_read(file, (uint32_t)dl_safetensors_find(file, "h"), h, &err), DL_OK);
    CU_ASSERT_EQUAL(dl_safetensors_read(file, (uint32_t)dl_safetensors_find(file, "b"), b, &err), DL_OK);
    CU_ASSERT(h[0] == 1 && h[1] == -2 && h[2] == 0x1p-24f && h[3] == 0 && signbit(h[3]));
    CU_ASSERT(isinf(h[4]) && isnan(h[5]));
    CU_ASSERT(b[0] == 1 && b[1] == -3);
    dl_safetensors_close(file);
}

#define ONE(dtype, shape, offsets) "{\"x\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void test_hostile_headers(void)
{
    static const struct {
        const char *header;
        size_t data_bytes;
        enum dl_rc rc;
        const char *text; /* Part of the message. */
    } cases[] = {
        {ONE("\"F32\"", "[2]", "[0,8]"), 8, DL_OK, NULL},
        {"{ }  ", 0, DL_OK, NULL},
        {ONE("\"F32\"", "[]", "[0,4]"), 4, DL_OK, NULL},
        {ONE("\"F32\"", "[2]", "[0,8]"), 7, DL_EINVAL, "of 7 in the file"},
        {ONE("\"F32\"", "[2]", "[0,8]"), 9, DL_EINVAL, "cover 8 bytes"},
        {ONE("\"F32\"", "[3]", "[0,8]"), 8, DL_EINVAL, "needs 12 bytes"},
        {ONE("\"F32\"", "[2]", "[8,0]"), 8, DL_EINVAL, "offsets"},
        {ONE("\"F32\"", "[2]", "[4,12]"), 12, DL_EINVAL, "starts at byte 4"},
        {ONE("\"I64\"", "[1]", "[0,8]"), 8, DL_EUNSUPPORTED, "I64"},
        {ONE("\"F32\"", "[0]", "[0,0]"), 0, DL_EINVAL, "empty"},
        {ONE("\"F32\"", "[18446744073709551615,2]", "[0,8]"), 8, DL_EINVAL, "too large"},
        {ONE("\"F32\"", "[4294967296,4294967296,2]", "[0,0]"), 8, DL_EINVAL, "too large"},
        {ONE("\"F32\"", "[18446744073709551616]", "[0,8]"), 8, DL_EINVAL, "64 bits"},
        {ONE("\"F32\"", "[-2]", "[0,8]"), 8, DL_EINVAL, "whole number"},
        {ONE("\"F32\"", "[2.0]", "[0,8]"), 8, DL_EINVAL, "does not end"},
        {ONE("\"F32\"", "[1,1,1,1,2]", "[0,8]"), 8, DL_EINVAL, "too long"},
        {ONE("\"F32\"", "[2]", "[0,9007199254740993]"), 8, DL_EINVAL,
         "9007199254740993"}, /* 2^53 + 1: not as double. */
        {ONE("\"F32\"", "[2]", "[0]"), 8, DL_EINVAL, "not complete"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, DL_EINVAL, "not complete"},
        {"{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, DL_EINVAL,
         "repeated"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"y\":1}}", 8, DL_EINVAL, "unknown"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         6, DL_EINVAL, "y starts at byte 2"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         8, DL_EINVAL, "twice"},
        {"{\"../x y\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, DL_EINVAL, "name"},
        {"{\"__metadata__\":{\"a\":1}}", 0, DL_EINVAL, "string"},
        {"{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, DL_EINVAL, "escape"},
        {"{\"__metadata__\":{\"a\":\"\\u00e4\"}}", 0, DL_OK, NULL},
        {"[]", 0, DL_EINVAL, "object"},
        {"", 0, DL_EINVAL, "object"},
        {"{\"x", 0, DL_EINVAL, "does not end"},
        {"{}x", 0, DL_EINVAL, "after the object"},
        {"{},", 0, DL_EINVAL, "after the object"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        struct dl_err err = {0};
        enum dl_rc rc = open_text(cases[i].header, cases[i].data_bytes, &err);
        CU_ASSERT_EQUAL(rc, cases[i].rc);
        bool told = cases[i].text == NULL || strstr(err.text, cases[i].text) != NULL;
        CU_ASSERT(told);
        if (rc != cases[i].rc || !told) {
            fprintf(stderr, "case %zu: rc %d, %s\n", i, (int)rc, err.text);
        }
    }
}

/* Every prefix of a good header must be refused, and none may read past its end (the sanitizers watch). */
static void test_every_truncation(void)
{
    static const char header[] = "{\"__metadata__\":{\"k\":\"\\u0041\\n\"},\"x\":{\"dtype\":\"BF16\",\"shape\":[1,2],"
                                 "\"data_offsets\":[0,4]}}";
    struct dl_err err;
    for (size_t length = 0; length < sizeof header - 1; length++) {
        struct dl_safetensors *file = NULL;
        DL_AUTO_FREE char *copy = malloc(length + 1);
        memcpy(copy, header, length);
        char *exact = realloc(copy, length > 0 ? length : 1);
        copy = exact;
        CU_ASSERT_EQUAL(dl_safetensors_parse(copy, length, 4, &file, &err), DL_EINVAL);
        CU_ASSERT_PTR_NULL(file);
    }
    struct dl_safetensors *file = NULL;
    CU_ASSERT_EQUAL(dl_safetensors_parse(header, sizeof header - 1, 4, &file, &err), DL_OK);
    dl_safetensors_close(file);
}

static void test_sizes_are_capped(void)
{
    struct dl_err err;
    struct dl_safetensors *file = NULL;
    write_raw("{}", DL_SAFETENSORS_HEADER_MAX + 1, 0);
    CU_ASSERT_EQUAL(dl_safetensors_open(path, &file, &err), DL_EINVAL);
    write_raw("{}", UINT64_MAX, 0);
    CU_ASSERT_EQUAL(dl_safetensors_open(path, &file, &err), DL_EINVAL);
    write_raw("{}", 3, 0);
    CU_ASSERT_EQUAL(dl_safetensors_open(path, &file, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(truncate(path, 5), 0);
    CU_ASSERT_EQUAL(dl_safetensors_open(path, &file, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(unlink(path), 0);
    CU_ASSERT_EQUAL(dl_safetensors_open(path, &file, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(dl_safetensors_open(folder, &file, &err), DL_EINVAL);
}

/* A file that shrinks after it was opened. */
static void test_truncated_under_us(void)
{
    struct dl_err err;
    struct dl_safetensors *file = NULL;
    float out[2];
    static const char header[] = ONE("\"F32\"", "[2]", "[0,8]");
    write_raw(header, strlen(header), 8);
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_open(path, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(truncate(path, (off_t)strlen(header) + 8 + 6), 0);
    CU_ASSERT_EQUAL(dl_safetensors_read(file, 0, out, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "ends at byte") != NULL);
    dl_safetensors_close(file);
}

/* A write that fails half-way leaves the old file and nothing else. */
static void test_failed_write_keeps_the_old_file(void)
{
    struct dl_err err;
    const struct dl_tensor small = tensor_of("a", 1, 4, 0), large = tensor_of("a", 1, 1 << 18, 0);
    float values[4] = {1, 2, 3, 4}, back[4];
    DL_AUTO_FREE float *many = calloc(1 << 18, sizeof *many);
    const float *data[] = {values}, *large_data[] = {many};
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_write(path, &small, data, 1, NULL, 0, &err), DL_OK);
    struct rlimit kept, limit;
    getrlimit(RLIMIT_FSIZE, &kept);
    limit = kept;
    limit.rlim_cur = 1 << 16;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    enum dl_rc rc = dl_safetensors_write(path, &large, large_data, 1, NULL, 0, &err);
    setrlimit(RLIMIT_FSIZE, &kept);
    CU_ASSERT_EQUAL(rc, DL_EIO);
    CU_ASSERT_EQUAL(files_in_folder(), 1);
    struct dl_safetensors *file = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_safetensors_open(path, &file, &err), DL_OK);
    CU_ASSERT_EQUAL(dl_safetensors_read(file, 0, back, &err), DL_OK);
    CU_ASSERT(back[0] == 1 && back[1] == 2 && back[2] == 3 && back[3] == 4);
    dl_safetensors_close(file);
    CU_ASSERT_EQUAL(dl_safetensors_write("/nonexistent/x", &small, data, 1, NULL, 0, &err), DL_ENOTFOUND);
}

int main(void)
{
    if (mkdtemp(folder) == NULL) {
        return 2;
    }
    snprintf(path, sizeof path, "%s/a.safetensors", folder);
    static const struct unit_case cases[] = {
        {"round trip", test_round_trip},
        {"16-bit types", test_16_bit},
        {"hostile headers", test_hostile_headers},
        {"every truncation", test_every_truncation},
        {"sizes are capped", test_sizes_are_capped},
        {"truncated under us", test_truncated_under_us},
        {"failed write keeps the old file", test_failed_write_keeps_the_old_file},
    };
    int status = unit_main("safetensors", cases, DL_COUNT_OF(cases));
    unlink(path);
    rmdir(folder);
    return status;
}
