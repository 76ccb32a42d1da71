/* Every allocation of what all programs share, and of the syncer's core, fails once, in turn: the caller is told DL_ENOMEM,
 * nothing is half there, nothing leaks (the last under SAN=address). */
#include <unistd.h>

#include "common/atomic_file.h"
#include "common/buf.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "common/spec.h"
#include "tests/unit/alloc_rig.h"
#include "tests/unit/core_rig.h"

/* --- job specs --- */

static uint32_t refusals;

/* What a message would have been made of may be missing without harm: such a failure is no reason to refuse. */
static void expect(enum dl_rc rc, bool was_injected, const struct dl_err *err)
{
    CU_ASSERT(rc == DL_OK || (was_injected && rc == DL_ENOMEM && err->text[0] != 0));
    refusals += rc == DL_ENOMEM ? 1 : 0;
}

static bool read_spec(long after)
{
    static struct dl_spec_warnings warnings;
    struct dl_spec *spec = NULL, *again = NULL;
    char *json = NULL;
    struct dl_err err = {.text = ""};
    arm(after);
    enum dl_rc rc = dl_spec_parse(rig_manifest, sizeof rig_manifest - 1, "rig", &spec, &warnings, &err);
    rc = rc == DL_OK ? dl_spec_to_json(spec, &json, &err) : rc;
    rc = rc == DL_OK ? dl_spec_parse_stored(json, strlen(json), "rig", &again, &err) : rc;
    bool was_injected = disarm();
    expect(rc, was_injected, &err);
    CU_ASSERT(rc != DL_OK || (again != NULL && again->sync.fragments == 4 && again->learners.max == 8));
    dl_spec_free(spec);
    dl_spec_free(again);
    free(json);
    return was_injected;
}

static char spec_path[64];

static bool load_spec(long after)
{
    struct dl_spec *spec = NULL;
    struct dl_err err = {.text = ""};
    arm(after);
    enum dl_rc rc = dl_spec_load(spec_path, &spec, NULL, &err);
    bool was_injected = disarm();
    expect(rc, was_injected, &err);
    CU_ASSERT(rc != DL_OK || (spec != NULL && spec->sync.fragments == 4));
    dl_spec_free(spec);
    return was_injected;
}

static void test_specs(void)
{
    FAIL_EACH(50, read_spec);
    snprintf(spec_path, sizeof spec_path, "/tmp/memory-XXXXXX");
    int fd = mkstemp(spec_path);
    CU_ASSERT_EQUAL_FATAL(write(fd, rig_manifest, sizeof rig_manifest - 1), (ssize_t)(sizeof rig_manifest - 1));
    close(fd);
    FAIL_EACH(20, load_spec);
    unlink(spec_path);
    CU_ASSERT(refusals > 100);
}

/* --- layouts --- */

enum { TENSORS = 12 };

static void make_tensors(struct dl_tensor tensors[TENSORS])
{
    memset(tensors, 0, TENSORS * sizeof *tensors);
    for (uint32_t i = 0; i < TENSORS; i++) {
        snprintf(tensors[i].name, sizeof tensors[i].name, "layers.%u.weight", i);
        tensors[i].role = DL_TENSOR_WEIGHT;
        tensors[i].layer = i;
        tensors[i].rank = 2;
        tensors[i].shape[0] = 64;
        tensors[i].shape[1] = 8 + i;
    }
}

static enum dl_layout_kind kind;

static bool make_layout(long after)
{
    static struct dl_tensor tensors[TENSORS];
    struct dl_layout *layout = NULL;
    struct dl_tensor *decoded = NULL;
    uint8_t *encoded = NULL;
    size_t size = 0;
    uint32_t count = 0;
    struct dl_err err = {.text = ""};
    make_tensors(tensors);
    arm(after);
    enum dl_rc rc = dl_layout_new(tensors, TENSORS, 4, kind, &layout, &err);
    rc = rc == DL_OK ? dl_tensors_encode(tensors, TENSORS, &encoded, &size, &err) : rc;
    rc = rc == DL_OK ? dl_tensors_decode(encoded, size, &decoded, &count, &err) : rc;
    bool was_injected = disarm();
    CU_ASSERT_EQUAL(rc, was_injected ? DL_ENOMEM : DL_OK);
    CU_ASSERT(was_injected || (count == TENSORS && layout->fragment_count == 4));
    dl_layout_free(layout);
    free(encoded);
    free(decoded);
    return was_injected;
}

static void test_layouts(void)
{
    static const enum dl_layout_kind kinds[] = {DL_LAYOUT_BALANCED, DL_LAYOUT_STRIDED, DL_LAYOUT_LAYER,
                                                DL_LAYOUT_TENSOR};
    for (size_t i = 0; i < DL_COUNT_OF(kinds); i++) {
        kind = kinds[i];
        FAIL_EACH(6, make_layout);
    }
}

/* --- safetensors --- */

static char weights_path[64];

static bool write_and_open(long after)
{
    static struct dl_tensor tensors[TENSORS];
    static float values[TENSORS][64 * (8 + TENSORS)];
    const float *data[TENSORS];
    static float read[64 * (8 + TENSORS)];
    const struct dl_safetensors_pair pair = {.key = (char *)(uintptr_t) "format", .value = (char *)(uintptr_t) "pt"};
    struct dl_safetensors *file = NULL;
    struct dl_err err = {.text = ""};
    make_tensors(tensors);
    for (uint32_t i = 0; i < TENSORS; i++) {
        values[i][0] = (float)i;
        data[i] = values[i];
    }
    unlink(weights_path);
    arm(after);
    enum dl_rc rc = dl_safetensors_write(weights_path, tensors, data, TENSORS, &pair, 1, &err);
    bool was_written = rc == DL_OK;
    rc = was_written ? dl_safetensors_open(weights_path, &file, &err) : rc;
    rc = rc == DL_OK ? dl_safetensors_read(file, 3, read, &err) : rc;
    bool was_injected = disarm();
    CU_ASSERT_EQUAL(rc, was_injected ? DL_ENOMEM : DL_OK);
    CU_ASSERT_EQUAL(access(weights_path, F_OK) == 0, was_written);
    CU_ASSERT(was_injected || read[0] == 3);
    dl_safetensors_close(file);
    return was_injected;
}

static void test_safetensors(void)
{
    char folder[] = "/tmp/memory-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    snprintf(weights_path, sizeof weights_path, "%s/w", folder);
    FAIL_EACH(5, write_and_open);
    unlink(weights_path);
    CU_ASSERT_EQUAL(rmdir(folder), 0); /* No temporary file is left. */
}

/* --- buffers --- */

static bool grow_buffer(long after)
{
    struct dl_buf buf;
    dl_buf_init(&buf, 1 << 20);
    arm(after);
    for (int i = 0; i < 4000; i++) {
        dl_buf_printf(&buf, "%d ", i);
        dl_buf_puts(&buf, "word ");
    }
    bool was_injected = disarm();
    CU_ASSERT_EQUAL(buf.failed, was_injected); /* And stays so, whatever is appended. */
    char *text = dl_buf_take(&buf);
    CU_ASSERT_EQUAL(text == NULL, was_injected);
    free(text);
    dl_buf_release(&buf);
    return was_injected;
}

static void test_buffers(void)
{
    FAIL_EACH(5, grow_buffer);
}

/* --- the syncer's core --- */

static bool new_core(long after)
{
    struct rig *rig = rig_spec();
    struct sy_core *core = NULL;
    struct dl_err err = {.text = ""};
    arm(after);
    enum dl_rc rc = sy_core_new(&(struct sy_core_config){.spec = rig->spec, .shard = 0, .epoch = 7}, &core, &err);
    bool was_injected = disarm();
    CU_ASSERT_EQUAL(rc, was_injected ? DL_ENOMEM : DL_OK);
    CU_ASSERT_EQUAL(core == NULL, was_injected);
    sy_core_free(core);
    rig_free(rig);
    return was_injected;
}

/* All its memory is taken at the start: rounds cannot fail for want of it. */
static void test_core(void)
{
    FAIL_EACH(8, new_core);
    struct rig *rig = rig_start(rig_spec());
    arm(-1); /* Counts, and lets none fail. */
    rig_seed(rig, 3);
    for (uint32_t i = 0; i < 100; i++) {
        for (uint32_t n = 0; n < 3; n++) {
            rig_step(rig, n);
            for (uint32_t p = 0; p < rig->spec->sync.fragments; p++) {
                const struct dl_wire_pull *pull = rig_pull(rig, 0, p);
                if (pull != NULL && rig_push(rig, 0, p, pull->round, 1) == DL_VERDICT_ACCEPTED) {
                    rig_commit(rig, p);
                    rig_apply(rig, 0, p);
                }
            }
        }
        rig_tick(rig, RIG_SECOND / 10);
    }
    long taken = allocations_asked;
    (void)disarm();
    CU_ASSERT(rig_view(rig).rounds_merged > 10);
    CU_ASSERT_EQUAL(taken, 0);
    rig_free(rig);
}

UNIT_MAIN("memory", {"specs", test_specs}, {"layouts", test_layouts}, {"safetensors", test_safetensors},
          {"buffers", test_buffers}, {"core", test_core})
