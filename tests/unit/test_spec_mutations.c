/* Manifests with random damage: each is refused with a text or accepted, and what is accepted comes back equal from its
 * JSON. SPEC_SEED and SPEC_ROUNDS choose other damage and more of it. */
#include <glob.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "common/spec.h"
#include "tests/unit/unit.h"

#define TEXT_MAX 8192

struct tally {
    unsigned accepted, refused;
};

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

/* Pieces that a parser may trip over. */
static const char *const pieces[] = {"\n",
                                     "  ",
                                     "\t",
                                     ":",
                                     ": ",
                                     "- ",
                                     "{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     "\"",
                                     "'",
                                     "#",
                                     "&a ",
                                     "*a",
                                     "!t ",
                                     "|\n",
                                     ">\n",
                                     "---\n",
                                     "...\n",
                                     "null",
                                     "~",
                                     "true",
                                     "-1",
                                     "0",
                                     "1e9",
                                     "1e-400",
                                     "99999999999999999999",
                                     "18446744073709551615",
                                     "100%",
                                     "0%",
                                     ".nan",
                                     "0x10",
                                     "\\u0000",
                                     "\xc3",
                                     "\xf0\x9f\x98\x80",
                                     "? ",
                                     "<<: ",
                                     "%YAML 1.1\n",
                                     "spec:",
                                     "pools: [{name: a}]",
                                     "template: {a: [b]}"};

static size_t damage(char *text, size_t size, struct dl_rng *rng)
{
    for (uint64_t edits = 1 + dl_rng_below(rng, 3); edits > 0; edits--) {
        size_t at = (size_t)dl_rng_below(rng, size + 1);
        switch (dl_rng_below(rng, 4)) {
        case 0: /* Cut a piece out. */
        {
            size_t wanted = (size_t)dl_rng_below(rng, 24), gone = DL_MIN(wanted, size - at);
            memmove(text + at, text + at + gone, size - at - gone);
            size -= gone;
            break;
        }
        case 1: /* Put a piece in. */
        {
            const char *piece = pieces[dl_rng_below(rng, DL_COUNT_OF(pieces))];
            size_t length = strlen(piece);
            if (size + length < TEXT_MAX) {
                memmove(text + at + length, text + at, size - at);
                for (size_t i = 0; i < length; i++) {
                    text[at + i] = piece[i];
                }
                size += length;
            }
            break;
        }
        case 2: /* Say a piece twice. */
        {
            size_t wanted = (size_t)dl_rng_below(rng, 64), length = DL_MIN(wanted, size - at);
            if (size + length < TEXT_MAX) {
                memmove(text + at + length, text + at, size - at);
                size += length;
            }
            break;
        }
        default: /* Another byte. */
            if (at < size) {
                text[at] = (char)dl_rng_below(rng, 256);
            }
        }
    }
    return size;
}

static void check_accepted(const struct dl_spec *spec)
{
    struct dl_spec *again = NULL;
    struct dl_err err = {0};
    DL_AUTO_FREE char *json = NULL, *twice = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(spec, &json, &err), DL_OK);
    enum dl_rc rc = dl_spec_parse(json, strlen(json), "json", &again, NULL, &err);
    if (rc != DL_OK) {
        printf("%s\n%s\n", err.text, json);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(again, &twice, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(json, twice);
    dl_spec_free(again);
}

static void try_manifest(const char *sample, size_t sample_size, struct dl_rng *rng, struct tally *tally)
{
    char text[TEXT_MAX];
    memcpy(text, sample, sample_size);
    size_t size = damage(text, sample_size, rng);
    /* A copy of just that size, so that a sanitizer sees a read beyond it. */
    DL_AUTO_FREE char *exact = malloc(size + 1);
    if (exact == NULL) {
        CU_FAIL_FATAL("no memory");
        return;
    }
    memcpy(exact, text, size);
    struct dl_spec *spec = NULL;
    struct dl_spec_warnings warnings;
    struct dl_err err = {0};
    if (dl_spec_parse(exact, size, "job.yaml", &spec, &warnings, &err) == DL_OK) {
        tally->accepted++;
        check_accepted(spec);
        dl_spec_free(spec);
    } else {
        tally->refused++;
        CU_ASSERT_EQUAL(err.rc, DL_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "job.yaml"));
        CU_ASSERT_PTR_NULL(spec);
    }
}

static void test_damaged_manifests_are_refused_or_round_trip(void)
{
    uint64_t seed = setting("SPEC_SEED", 1), rounds = setting("SPEC_ROUNDS", 300);
    printf("(seed %" PRIu64 ") ", seed);
    struct tally tally = {0};
    glob_t found;
    CU_ASSERT_EQUAL_FATAL(glob("crds/samples/*.yaml", 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char sample[TEXT_MAX / 2];
        DL_AUTO_FILE FILE *file = fopen(found.gl_pathv[i], "rb");
        if (file == NULL) {
            CU_FAIL_FATAL("a sample cannot be opened");
            return;
        }
        size_t size = fread(sample, 1, sizeof sample, file);
        CU_ASSERT_FATAL(size > 0 && size < sizeof sample);
        for (uint64_t round = 0; round < rounds; round++) {
            struct dl_rng rng;
            dl_rng_init(&rng, seed, dl_rng_stream("manifest", i, round));
            try_manifest(sample, size, &rng, &tally);
        }
    }
    globfree(&found);
    CU_ASSERT(tally.accepted > 0);
    CU_ASSERT(tally.refused > 0);
    printf("(%u accepted, %u refused) ", tally.accepted, tally.refused);
}

UNIT_MAIN("spec_mutations", {"S5 damaged manifests", test_damaged_manifests_are_refused_or_round_trip})
