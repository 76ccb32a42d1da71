/* What the tests of the Kubernetes client share: a loop, a client of a fake API server, and waiting with a bound. */
#ifndef DL_TESTS_KUBE_RIG_H
#define DL_TESTS_KUBE_RIG_H

#include "common/clock.h"
#include "operator/kube/api.h"
#include "tests/unit/fake_api.h"
#include "tests/unit/unit.h"

#define RIG_BOUND_NS (20 * DL_NS_PER_SECOND)

struct rig {
    struct fake_api *api;
    struct op_loop *loop;
    struct op_client *client;
};

static inline void rig_start_with(struct rig *rig, const struct op_config *config,
                                  const struct op_client_options *options)
{
    struct dl_err err = {.text = ""};
    enum dl_rc rc = op_loop_new(&rig->loop, &err);
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    rc = op_client_new(rig->loop, config, options, &rig->client, &err);
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
}

static inline void rig_start(struct rig *rig)
{
    rig->api = fake_api_start(NULL);
    struct op_config config = fake_api_config(rig->api);
    rig_start_with(rig, &config, NULL);
}

static inline void rig_stop(struct rig *rig)
{
    op_client_free(rig->client);
    op_loop_free(rig->loop);
    fake_api_stop(rig->api);
}

/* Turns the loop until `condition` holds; false when the bound is reached. */
#define RIG_UNTIL(rig, condition)                                                                                      \
    ({                                                                                                                 \
        int64_t until_ns_ = dl_now_ns() + RIG_BOUND_NS;                                                                \
        while (!(condition) && dl_now_ns() < until_ns_) {                                                              \
            op_loop_turn((rig)->loop, 10);                                                                             \
        }                                                                                                              \
        (condition);                                                                                                   \
    })

/* An answer, kept. */
struct rig_answer {
    int calls;
    enum dl_rc rc;
    int transport, status;
    uint32_t tries;
    bool is_quota;
    char reason[64], text[DL_ERR_TEXT_MAX], body[4096];
    int64_t retry_after_ns;
};

static inline void rig_done(void *context, const struct op_result *result)
{
    struct rig_answer *answer = context;
    answer->calls++;
    answer->rc = result->rc;
    answer->transport = result->transport;
    answer->status = result->status;
    answer->tries = result->tries;
    answer->is_quota = op_result_is_quota(result);
    answer->retry_after_ns = result->retry_after_ns;
    snprintf(answer->reason, sizeof answer->reason, "%s", result->reason);
    snprintf(answer->text, sizeof answer->text, "%s", result->rc == DL_OK ? "" : result->err.text);
    snprintf(answer->body, sizeof answer->body, "%s", result->body);
}

static inline struct op_reply_to rig_to(struct rig_answer *answer)
{
    memset(answer, 0, sizeof *answer);
    return (struct op_reply_to){rig_done, answer, NULL};
}

#define RIG_POD(pod_name) ((struct op_ref){.resource = &op_res_pods, .space = "a", .name = (pod_name)})

#define RIG_POD_PATH "/api/v1/namespaces/a/pods/x"
#define RIG_POD_TEXT                                                                                                   \
    "{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"x\",\"namespace\":\"a\"},\"spec\":{\"n\":1}}"

static inline enum dl_rc rig_get(struct rig *rig, struct rig_answer *answer)
{
    struct op_ref ref = RIG_POD("x");
    enum dl_rc rc = op_api_get(rig->client, &ref, rig_to(answer), NULL);
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT_EQUAL(answer->calls, 0); /* Never within the call. */
    CU_ASSERT_TRUE_FATAL(RIG_UNTIL(rig, answer->calls > 0));
    return answer->rc;
}

/* A request as it stands, to the pod x. */
static inline enum dl_rc rig_request(struct rig *rig, struct op_request request, struct rig_answer *answer)
{
    struct op_reply_to to = rig_to(answer);
    request.path = RIG_POD_PATH;
    request.done = to.done;
    request.context = to.context;
    CU_ASSERT_EQUAL(op_client_send(rig->client, &request, NULL, NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(rig, answer->calls > 0));
    return answer->rc;
}

/* Tried once: what goes wrong is told at once. */
static inline enum dl_rc rig_get_once(struct rig *rig, struct rig_answer *answer)
{
    return rig_request(rig, (struct op_request){.method = "GET", .is_once = true}, answer);
}

static inline enum dl_rc rig_create(struct rig *rig, struct rig_answer *answer)
{
    struct op_ref ref = RIG_POD("x");
    enum dl_rc rc = op_api_create(rig->client, &ref, RIG_POD_TEXT, rig_to(answer), NULL);
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT_TRUE_FATAL(RIG_UNTIL(rig, answer->calls > 0));
    return answer->rc;
}

#endif
