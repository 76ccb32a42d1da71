/* Jobs' tokens are made from one key and the job's uid, so that no token ever has to be read from the cluster (K11): the
 * key stands in one Secret beside the operator's lease. */
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "common/mem.h"
#include "operator/controller/internal.h"
#include "operator/reconcile/json.h"

#define KEY_AGAIN_NS (2 * OP_SECOND)

static void make_key(struct op_controller *c)
{
    if (RAND_bytes(c->key, sizeof c->key) != 1) {
        dl_error("no random numbers for the token key"); /* Known to nobody all the same. */
    }
}

static void ask(struct op_controller *c, enum op_errand_type type)
{
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, NULL, type);
    struct op_ref ref = {.resource = &op_res_secrets, .space = c->options.key_space, .name = c->options.key_name};
    if (errand == NULL) {
        return;
    }
    struct op_reply_to to = {.done = op_errand_done, .context = errand, .id = &errand->id};
    enum dl_rc rc;
    if (type == OP_ERRAND_KEY) {
        rc = op_api_get(c->client, &ref, to, &err);
    } else {
        char coded[64], text[512];
        EVP_EncodeBlock((unsigned char *)coded, c->key, sizeof c->key);
        snprintf(text, sizeof text,
                 "{\"apiVersion\":\"v1\",\"kind\":\"Secret\",\"metadata\":{\"name\":\"%s\",\"namespace\":\"%s\","
                 "\"labels\":{\"app.kubernetes.io/part-of\":\"diloco\"}},\"data\":{\"key\":\"%s\"}}",
                 c->options.key_name, c->options.key_space, coded);
        rc = op_api_create(c->client, &ref, text, to, &err);
    }
    if (rc != DL_OK) {
        dl_warn("token key error=\"%s\"", err.text);
        op_errand_free(errand);
        return;
    }
    c->key_state = OP_KEY_ASKED;
}

static void wake_all(struct op_controller *c)
{
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&c->jobs, &place, &key, &value)) {
        op_controller_wake(c, key, 0);
    }
}

static bool take_key(struct op_controller *c, const char *body, size_t size)
{
    cJSON *tree = NULL;
    struct dl_err err;
    unsigned char plain[96];
    bool is_good = false;
    if (op_json_parse(body, size, &tree, &err) != DL_OK) {
        return false;
    }
    const char *coded = op_json_text(cJSON_GetObjectItemCaseSensitive(tree, "data"), "key", "");
    size_t length = strlen(coded);
    if (length == 44) { /* 32 bytes. */
        is_good = EVP_DecodeBlock(plain, (const unsigned char *)coded, (int)length) >= OP_TOKEN_KEY_BYTES;
    }
    if (is_good) {
        memcpy(c->key, plain, sizeof c->key);
    }
    cJSON_Delete(tree);
    return is_good;
}

void op_token_on_answer(struct op_controller *c, enum op_errand_type type, const struct op_result *result)
{
    c->key_state = OP_KEY_UNKNOWN;
    c->key_due_ns = op_loop_now_ns(c->loop) + KEY_AGAIN_NS;
    if (type == OP_ERRAND_KEY && result->rc == DL_ENOTFOUND) {
        make_key(c);
        ask(c, OP_ERRAND_MAKE_KEY);
        return;
    }
    if (type == OP_ERRAND_MAKE_KEY && result->rc == DL_EEXISTS) {
        ask(c, OP_ERRAND_KEY); /* A peer was faster. */
        return;
    }
    bool is_known = result->rc == DL_OK && (type == OP_ERRAND_MAKE_KEY || take_key(c, result->body, result->size));
    if (!is_known && (result->rc == DL_EDENIED || result->rc == DL_OK)) {
        dl_warn("token key not usable: jobs of another process cannot be asked to end early; allow get and create of "
                "secret %s/%s error=\"%s\"",
                c->options.key_space, c->options.key_name, result->err.text);
        make_key(c);
        is_known = true;
    }
    if (is_known) {
        c->key_state = OP_KEY_KNOWN;
        wake_all(c);
    }
}

bool op_token_of_job(struct op_controller *c, const char *job_uid, char out[OP_TOKEN_TEXT_MAX])
{
    if (c->key_state == OP_KEY_UNKNOWN && c->options.key_space == NULL) {
        make_key(c);
        c->key_state = OP_KEY_KNOWN;
    }
    if (c->key_state == OP_KEY_UNKNOWN && op_loop_now_ns(c->loop) >= c->key_due_ns) {
        c->key_due_ns = op_loop_now_ns(c->loop) + KEY_AGAIN_NS;
        ask(c, OP_ERRAND_KEY);
    }
    if (c->key_state != OP_KEY_KNOWN) {
        return false;
    }
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    if (HMAC(EVP_sha256(), c->key, (int)sizeof c->key, (const unsigned char *)job_uid, strlen(job_uid), digest,
             &size) == NULL ||
        size < 32) {
        return false;
    }
    for (unsigned int i = 0; i < 32; i++) {
        snprintf(out + (size_t)2 * i, 3, "%02x", digest[i]);
    }
    return true;
}
