/* JSON with exact integers; one job view from several shards' views. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "operator/reconcile/status.h"
#include "tests/unit/unit.h"

/* --- JSON --- */

static void test_json_keeps_integers_exact(void)
{
    static const char text[] =
        "{\"big\":18446744073709551615,\"odd\":9007199254740993,\"minus\":-5,\"real\":1.5e3,\"t\":\"7\\\"8\","
        "\"none\":null,\"yes\":true,\"list\":[1,2],\"huge\":18446744073709551616}";
    cJSON *tree = NULL;
    CU_ASSERT_EQUAL_FATAL(op_json_parse(text, sizeof text - 1, &tree, NULL), DL_OK);
    CU_ASSERT(op_json_u64(tree, "big", 0) == UINT64_MAX);
    CU_ASSERT(op_json_u64(tree, "odd", 0) == UINT64_C(9007199254740993));
    CU_ASSERT(op_json_u64(tree, "minus", 3) == 3);
    CU_ASSERT_EQUAL(op_json_double(tree, "minus", 0), -5);
    CU_ASSERT_EQUAL(op_json_double(tree, "real", 0), 1500);
    CU_ASSERT_STRING_EQUAL(op_json_text(tree, "t", ""), "7\"8");
    CU_ASSERT(isnan(op_json_double(tree, "none", NAN)));
    CU_ASSERT(op_json_bool(tree, "yes", false));
    CU_ASSERT_EQUAL(op_json_u64(tree, "huge", 9), 9);
    CU_ASSERT_EQUAL(op_json_u32(tree, "odd", 9), 9);
    CU_ASSERT_EQUAL(op_json_u64(NULL, "odd", 9), 9);
    cJSON_Delete(tree);
}

static void test_json_refuses(void)
{
    static const char *const bad[] = {"",     "{",   "{\"a\":}", "{\"a\":-}", "{\"a\":1-2}", "{\"a\":1} x",
                                      "[1,]", "nul", "\"a"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cJSON *tree = NULL;
        struct dl_err err = {.text = ""};
        CU_ASSERT_EQUAL(op_json_parse(bad[i], strlen(bad[i]), &tree, &err), DL_EINVAL);
        CU_ASSERT_PTR_NULL(tree);
        CU_ASSERT_NOT_EQUAL(err.text[0], 0);
    }
    CU_ASSERT_EQUAL(op_json_parse("{}", OP_JSON_BYTES_MAX + 1ul, NULL, NULL), DL_EINVAL);
}

static void test_json_writes_what_it_reads(void)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_json_put_u64(&out, "big", UINT64_MAX);
    op_json_put_i64(&out, "minus", -7);
    op_json_put_text(&out, "text", "a\"b\\c\n\x01");
    op_json_put_text(&out, "nothing", NULL);
    op_json_put_double(&out, "nan", NAN);
    op_json_put_bool(&out, "no", false);
    op_json_array_begin(&out, "list");
    op_json_put_u64(&out, NULL, 1);
    op_json_object_begin(&out, NULL);
    op_json_object_end(&out);
    op_json_array_end(&out);
    op_json_object_end(&out);
    char *text = op_json_finish(&out);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    if (text == NULL) {
        abort(); /* Static analysis does not know that the assertion ends the test. */
    }
    CU_ASSERT_STRING_EQUAL(
        text, "{\"big\":18446744073709551615,\"minus\":-7,\"text\":\"a\\\"b\\\\c\\u000a\\u0001\",\"nothing\":null,"
              "\"nan\":null,\"no\":false,\"list\":[1,{}]}");
    cJSON *tree = NULL;
    CU_ASSERT_EQUAL_FATAL(op_json_parse(text, strlen(text), &tree, NULL), DL_OK);
    CU_ASSERT_STRING_EQUAL(op_json_text(tree, "text", ""), "a\"b\\c\n\x01");
    cJSON_Delete(tree);
    free(text);
}

/* --- a shard's view --- */

static const char shard_0[] =
    "{\"job\":\"demo\",\"shard\":0,\"shards\":2,\"epoch\":5,\"phase\":\"Training\",\"message\":\"2/2 "
    "learners\",\"round\":10,\"step\":40,"
    "\"tokens\":9007199254740993,\"tokensMerged\":100,\"tokenBudget\":9007199254740999,\"loss\":2.5,\"goodput\":0.9,"
    "\"data\":{\"positions\":1000,\"counted\":600,\"leased\":300,\"queued\":100},"
    "\"quorum\":{\"have\":2,\"need\":1},\"learnersWanted\":2,\"connected\":2,"
    "\"validation\":{\"first\":{\"loss\":5.5,\"tokens\":10,\"round\":0},\"last\":{\"loss\":3.5,\"tokens\":80,\"round\":"
    "9}},"
    "\"learners\":[{\"learner\":1,\"uid\":\"b\",\"admission\":2,\"state\":\"connected\",\"step\":40,\"tokens\":50,"
    "\"tokensPerSecond\":7,"
    "\"stepSeconds\":0.5,\"loss\":2.4,\"behind\":1,\"heardSecondsAgo\":0.2,\"pushesMerged\":4,\"waitedSeconds\":0},"
    "{\"learner\":0,\"uid\":\"a\",\"admission\":1,\"state\":\"lost\",\"step\":30,\"pushesMerged\":3},"
    "{\"learner\":0,\"uid\":\"a2\",\"admission\":3,\"state\":\"connected\",\"step\":35,\"loss\":null,\"pushesMerged\":"
    "5}],"
    "\"fragments\":[{\"fragment\":2,\"version\":4,\"round\":10,\"open\":false},{\"fragment\":0,\"version\":5,\"round\":"
    "8,\"open\":true,"
    "\"have\":1,\"need\":1,\"asked\":2}],\"verdicts\":{\"accepted\":12,\"late\":1},\"joins\":3,"
    "\"leaves\":{\"goodbye\":0,\"lost\":1},\"refusals\":0,\"times\":{\"wait\":0.5,\"total\":1.5},\"graceSeconds\":0.25,"
    "\"bytesIn\":1000,"
    "\"bytesOut\":2000,\"residentBytes\":3000,\"uptimeSeconds\":60}";

static const char shard_1[] =
    "{\"job\":\"demo\",\"shard\":1,\"shards\":2,\"phase\":\"WaitingForQuorum\",\"message\":\"0/1 "
    "learners\",\"round\":7,\"step\":41,"
    "\"tokens\":90,\"tokensMerged\":40,\"tokenBudget\":9007199254740999,\"loss\":2.7,\"goodput\":0.8,"
    "\"quorum\":{\"have\":0,\"need\":1},\"learnersWanted\":2,\"connected\":1,"
    "\"validation\":{\"first\":{\"loss\":5.4,\"tokens\":20,\"round\":1},\"last\":{\"loss\":3.4,\"tokens\":95,\"round\":"
    "9}},"
    "\"learners\":[{\"learner\":1,\"uid\":\"b\",\"admission\":1,\"state\":\"connected\",\"step\":41,\"tokens\":51,"
    "\"loss\":2.3,"
    "\"behind\":3,\"heardSecondsAgo\":0.1,\"pushesMerged\":2}],"
    "\"fragments\":[{\"fragment\":1,\"version\":3,\"round\":7}],\"verdicts\":{\"accepted\":6},\"joins\":2,\"leaves\":{"
    "\"lost\":2},"
    "\"times\":{\"wait\":0.25,\"total\":2.5},\"graceSeconds\":0.5,\"bytesIn\":10,\"bytesOut\":20,\"residentBytes\":30,"
    "\"uptimeSeconds\":50,\"result\":\"succeeded\"}";

static struct op_job_status parsed(const char *text)
{
    struct op_job_status status;
    op_status_init(&status);
    struct dl_err err = {.text = ""};
    CU_ASSERT_EQUAL_FATAL(op_status_parse(text, strlen(text), &status, &err), DL_OK);
    return status;
}

static struct op_job_status combined(const struct op_job_status *a, const struct op_job_status *b)
{
    struct op_job_status all;
    op_status_init(&all);
    const struct op_job_status *shards[] = {a, b};
    CU_ASSERT_EQUAL_FATAL(op_status_combine(shards, b == NULL && a->shards == 1 ? 1 : 2, &all, NULL), DL_OK);
    return all;
}

static void test_parse(void)
{
    struct op_job_status status = parsed(shard_0);
    CU_ASSERT_STRING_EQUAL(status.job, "demo");
    CU_ASSERT_EQUAL(status.phase, OP_STATUS_TRAINING);
    CU_ASSERT(status.tokens == UINT64_C(9007199254740993));
    CU_ASSERT_EQUAL(status.learner_count, 3);
    /* Ascending ids, newest admission first. */
    CU_ASSERT_STRING_EQUAL(status.learners[0].uid, "a2");
    CU_ASSERT_STRING_EQUAL(status.learners[1].uid, "a");
    CU_ASSERT_STRING_EQUAL(op_status_learner(&status, 0)->uid, "a2");
    CU_ASSERT_PTR_NULL(op_status_learner(&status, 7));
    CU_ASSERT(isnan(status.learners[0].loss));
    CU_ASSERT_EQUAL(status.fragments[0].fragment, 0);
    CU_ASSERT(status.fragments[0].open);
    CU_ASSERT_EQUAL(status.verdicts[DL_VERDICT_LATE], 1);
    CU_ASSERT_EQUAL(status.leaves[2], 1);
    CU_ASSERT_EQUAL(status.result, OP_STATUS_RESULT_NONE);
    op_status_release(&status);
    struct dl_err err;
    CU_ASSERT_EQUAL(op_status_parse("{\"job\":\"x\"}", 11, &status, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(op_status_parse("[]", 2, &status, &err), DL_EINVAL);
}

static void check_rules(const struct op_job_status *all)
{
    CU_ASSERT_EQUAL(all->shards, 2);
    CU_ASSERT_EQUAL(all->shards_heard, 2);
    /* sums */
    CU_ASSERT_EQUAL(all->round, 17);
    CU_ASSERT_EQUAL(all->verdicts[DL_VERDICT_ACCEPTED], 18);
    CU_ASSERT_EQUAL(all->bytes_in, 1010);
    CU_ASSERT_EQUAL(all->resident_bytes, 3030);
    CU_ASSERT_EQUAL(all->fragment_count, 3);
    /* maxima */
    CU_ASSERT_EQUAL(all->step, 41);
    CU_ASSERT(all->tokens == UINT64_C(9007199254740993));
    CU_ASSERT_EQUAL(all->joins, 3);
    CU_ASSERT_EQUAL(all->leaves[2], 2);
    CU_ASSERT_EQUAL(all->times[0], 0.5);
    CU_ASSERT_EQUAL(all->times[5], 2.5);
    CU_ASSERT_EQUAL(all->grace_seconds, 0.5);
    CU_ASSERT_EQUAL(all->quorum_need, 1);
    /* minima */
    CU_ASSERT_EQUAL(all->connected, 1);
    CU_ASSERT_EQUAL(all->quorum_have, 0);
    CU_ASSERT_EQUAL(all->goodput, 0.8);
    CU_ASSERT_EQUAL(all->uptime_seconds, 50);
    CU_ASSERT_EQUAL(all->phase, OP_STATUS_WAITING_FOR_QUORUM);
    CU_ASSERT_STRING_EQUAL(all->message, "0/1 learners");
    /* mean by fragments: (2 x 100 + 1 x 40) / 3 */
    CU_ASSERT_EQUAL(all->tokens_merged, 80);
    CU_ASSERT_EQUAL(all->loss, 2.5); /* Of the shard that has heard of more tokens. */
    CU_ASSERT_TRUE(all->data.known); /* Of the only one that has it. */
    CU_ASSERT(all->data.positions == 1000 && all->data.counted == 600 && all->data.leased == 300);
    CU_ASSERT_EQUAL(all->data.queued, 100);
    CU_ASSERT_EQUAL(all->validation_first.loss, 5.5);
    CU_ASSERT_EQUAL(all->validation_last.loss, 3.4);
    CU_ASSERT_EQUAL(all->result, OP_STATUS_RESULT_NONE); /* Only one shard has one. */
    /* learners */
    CU_ASSERT_EQUAL(all->learner_count, 3);
    const struct op_learner_status *one = op_status_learner(all, 1);
    CU_ASSERT_EQUAL(one->link, OP_LINK_CONNECTED);
    CU_ASSERT_EQUAL(one->step, 41);
    CU_ASSERT_EQUAL(one->loss, 2.3);
    CU_ASSERT_EQUAL(one->behind, 3);
    CU_ASSERT_EQUAL(one->pushes_merged, 6);
    CU_ASSERT_EQUAL(one->heard_seconds_ago, 0.1);
    CU_ASSERT_EQUAL(op_status_learner(all, 0)->link, OP_LINK_LOST); /* Connected to one shard of two only. */
    CU_ASSERT_STRING_EQUAL(op_status_learner(all, 0)->uid, "a2");
}

static void test_combine_rules_in_any_order(void)
{
    struct op_job_status a = parsed(shard_0), b = parsed(shard_1);
    struct op_job_status ab = combined(&a, &b), ba = combined(&b, &a);
    check_rules(&ab);
    check_rules(&ba);
    op_status_release(&ab);
    op_status_release(&ba);
    op_status_release(&a);
    op_status_release(&b);
}

static void test_combine_results(void)
{
    struct op_job_status a = parsed(shard_0), b = parsed(shard_1);
    static const int rows[][3] = {
        {0, 0, 0}, {0, 1, 1}, {1, 0, 1}, {3, 0, 3}, {2, 1, 2}, {-1, 0, -1}, {0, -1, -1}, {3, -1, -1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        a.result = rows[i][0];
        b.result = rows[i][1];
        struct op_job_status all = combined(&a, &b);
        CU_ASSERT_EQUAL(all.result, rows[i][2]);
        op_status_release(&all);
    }
    CU_ASSERT_STRING_EQUAL(op_status_result_name(2), "timeout");
    CU_ASSERT_PTR_NULL(op_status_result_name(-1));
    CU_ASSERT_EQUAL(op_status_result_parse("failed"), 3);
    op_status_release(&a);
    op_status_release(&b);
}

static void test_combine_with_a_shard_that_does_not_answer(void)
{
    struct op_job_status a = parsed(shard_0);
    struct op_job_status all = combined(&a, NULL);
    CU_ASSERT_EQUAL(all.phase, OP_STATUS_UNREACHABLE);
    CU_ASSERT_EQUAL(all.shards_heard, 1);
    CU_ASSERT_EQUAL(all.round, 10);
    CU_ASSERT_STRING_EQUAL(all.message, "1 of 2 syncers answer");
    CU_ASSERT_EQUAL(all.result, OP_STATUS_RESULT_NONE);
    op_status_release(&all);
    op_status_release(&a);
    const struct op_job_status *nobody[] = {NULL};
    CU_ASSERT_EQUAL(op_status_combine(nobody, 1, &all, NULL), DL_OK);
    CU_ASSERT_EQUAL(all.phase, OP_STATUS_UNREACHABLE);
    CU_ASSERT_EQUAL(all.shards_heard, 0);
    CU_ASSERT(isnan(all.loss));
    op_status_release(&all);
}

static char *written(const struct op_job_status *status)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_status_put(status, &out);
    op_json_object_end(&out);
    char *text = op_json_finish(&out);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    return text;
}

/* One shard alone is the job; and what is written reads back as the same. */
static void test_one_shard_is_itself_and_round_trips(void)
{
    struct op_job_status a = parsed(shard_0);
    a.shards = 1;
    a.result = 1;
    struct op_job_status all = combined(&a, NULL);
    char *before = written(&a), *after = written(&all);
    CU_ASSERT_STRING_EQUAL(before, after);
    struct op_job_status again = parsed(after);
    char *third = written(&again);
    CU_ASSERT_STRING_EQUAL(after, third);
    CU_ASSERT_EQUAL(again.result, 1);
    free(before);
    free(after);
    free(third);
    op_status_release(&a);
    op_status_release(&all);
    op_status_release(&again);
}

static void test_a_process_that_came_back_is_listed_once(void)
{
    static const char text[] = "{\"phase\":\"Training\",\"learners\":["
                               "{\"learner\":0,\"uid\":\"pod\",\"admission\":1,\"state\":\"lost\",\"step\":5},"
                               "{\"learner\":0,\"uid\":\"other\",\"admission\":2,\"state\":\"left\",\"step\":6},"
                               "{\"learner\":0,\"uid\":\"pod\",\"admission\":3,\"state\":\"connected\",\"step\":7}]}";
    struct op_job_status a = parsed(text), all = combined(&a, NULL);
    CU_ASSERT_EQUAL(all.learner_count, 2);
    CU_ASSERT_EQUAL(all.learners[0].step, 7);
    CU_ASSERT_EQUAL(all.learners[1].step, 6);
    op_status_release(&a);
    op_status_release(&all);
}

UNIT_MAIN("status", {"JSON keeps integers exact", test_json_keeps_integers_exact}, {"JSON refuses", test_json_refuses},
          {"JSON writes what it reads", test_json_writes_what_it_reads}, {"parse", test_parse},
          {"combine, in any order", test_combine_rules_in_any_order}, {"combine results", test_combine_results},
          {"a shard that does not answer", test_combine_with_a_shard_that_does_not_answer},
          {"one shard is itself", test_one_shard_is_itself_and_round_trips},
          {"a process that came back", test_a_process_that_came_back_is_listed_once})
