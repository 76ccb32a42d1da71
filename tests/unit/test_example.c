/* docs/examples/minimal.c compiles as it stands, and trains against a scripted syncer. */
int minimal_main(int argc, char **argv);
#define main minimal_main
#include "../../docs/examples/minimal.c"
#undef main

#include <math.h>

#include "tests/unit/fake_syncer.h"
#include "tests/unit/unit.h"

static void *stop_after_rounds(void *argument)
{
    struct fake_syncer *syncer = argument;
    pthread_mutex_lock(&syncer->lock);
    while (syncer->pushes_merged < 100) {
        pthread_cond_wait(&syncer->changed, &syncer->lock);
    }
    syncer->stop_result = DL_STOP_SUCCEEDED;
    pthread_mutex_unlock(&syncer->lock);
    return NULL;
}

static void test_minimal_example_trains(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->token = "secret";
    fake_listen(syncer);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, stop_after_rounds, syncer), 0);
    char endpoint[64], name[] = "minimal", job[] = "demo", token[] = "secret", wrong[] = "wrong";
    snprintf(endpoint, sizeof endpoint, "ws://127.0.0.1:%u", syncer->port);
    char *refused[] = {name, job, endpoint, wrong, NULL};
    CU_ASSERT_EQUAL(minimal_main(4, refused), 1);
    char *argv[] = {name, job, endpoint, token, NULL};
    CU_ASSERT_EQUAL(minimal_main(4, argv), 0);
    pthread_join(thread, NULL);
    float values[2]; /* One parameter a fragment; which is which, the layout decides. */
    for (uint32_t p = 0; p < 2; p++) {
        const struct dl_slice *slice = &syncer->layout->slices[syncer->layout->fragments[p].first_slice];
        values[slice->tensor] = syncer->theta[p][slice->fragment_offset];
    }
    CU_ASSERT(fabsf(values[0] - 3.0f) < 0.2f);
    CU_ASSERT(fabsf(values[1] - 0.5f) < 0.2f);
    fake_free(syncer);
    char *nothing[] = {name, NULL};
    CU_ASSERT_EQUAL(minimal_main(1, nothing), 2);
}

UNIT_MAIN("example", {"minimal", test_minimal_example_trains})
