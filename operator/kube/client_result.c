/* How an answer is read: transport code, HTTP status and body together. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/kube/client_internal.h"

#define SHOWN_PATH_MAX 160
#define RETRY_AFTER_MAX_S 60

static const struct {
    CURLcode code;
    enum dl_rc rc;
    bool was_not_sent; /* Nothing of the request can have had an effect. */
} transport_table[] = {
    {CURLE_COULDNT_RESOLVE_HOST, DL_ENET, true},     {CURLE_COULDNT_RESOLVE_PROXY, DL_ENET, true},
    {CURLE_COULDNT_CONNECT, DL_ENET, true},          {CURLE_SSL_CONNECT_ERROR, DL_ENET, true},
    {CURLE_PEER_FAILED_VERIFICATION, DL_ENET, true}, {CURLE_SSL_CERTPROBLEM, DL_EDENIED, true},
    {CURLE_SSL_CACERT_BADFILE, DL_EDENIED, true},    {CURLE_OPERATION_TIMEDOUT, DL_ETIMEOUT, false},
    {CURLE_OUT_OF_MEMORY, DL_ENOMEM, true},          {CURLE_UNSUPPORTED_PROTOCOL, DL_EINVAL, true},
    {CURLE_URL_MALFORMAT, DL_EINVAL, true},          {CURLE_WEIRD_SERVER_REPLY, DL_EPROTO, false},
    {CURLE_BAD_CONTENT_ENCODING, DL_EPROTO, false},  {CURLE_WRITE_ERROR, DL_EPROTO, false},
};

static enum dl_rc transport_rc(CURLcode code)
{
    for (size_t i = 0; i < DL_COUNT_OF(transport_table); i++) {
        if (transport_table[i].code == code) {
            return transport_table[i].rc;
        }
    }
    return DL_ENET;
}

static bool was_not_sent(CURLcode code)
{
    for (size_t i = 0; i < DL_COUNT_OF(transport_table); i++) {
        if (transport_table[i].code == code) {
            return transport_table[i].was_not_sent;
        }
    }
    return false;
}

static enum dl_rc status_rc(int status, const char *reason)
{
    if (status >= 200 && status < 300) {
        return DL_OK;
    }
    switch (status) {
    case 401:
    case 403: return DL_EDENIED;
    case 404: return DL_ENOTFOUND;
    case 409: return strcmp(reason, "AlreadyExists") == 0 ? DL_EEXISTS : DL_ECONFLICT;
    case 410: return DL_EGONE;
    case 408:
    case 429:
    case 504: return DL_ETIMEOUT;
    default: break;
    }
    if (strcmp(reason, "Expired") == 0) {
        return DL_EGONE;
    }
    if (status >= 400 && status < 500) {
        return DL_EINVAL;
    }
    return status >= 500 ? DL_ENET : DL_EPROTO;
}

/* What an API server answers to the application of an object with a field that its kind does not have: 500, though no repeat
 * will ever help. */
static bool is_unknown_field(int status, const char *message)
{
    return status == 500 && strstr(message, "failed to create typed patch object") != NULL;
}

static int shown_size(const struct op_call *call)
{
    return (int)DL_MIN(strcspn(call->path, "?"), (size_t)SHOWN_PATH_MAX);
}

void op_call_fail(const struct op_call *call, enum dl_rc rc, const char *why, struct op_result *result)
{
    *result = (struct op_result){.rc = rc, .tries = call->tries, .body = "", .reason = "", .message = ""};
    dl_err_set(&result->err, rc, "%s %.*s: %s", call->request.method, shown_size(call), call->path, why);
}

static void read_status(struct op_call *call, struct op_result *result, cJSON **tree)
{
    *tree = cJSON_ParseWithLength(result->body, result->size);
    const char *reason = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(*tree, "reason"));
    const char *message = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(*tree, "message"));
    const cJSON *details = cJSON_GetObjectItemCaseSensitive(*tree, "details");
    const cJSON *retry = cJSON_GetObjectItemCaseSensitive(details, "retryAfterSeconds");
    result->reason = reason != NULL ? reason : "";
    result->message = message != NULL ? message : "";
    curl_off_t header_s = 0;
    curl_easy_getinfo(call->transfer.easy, CURLINFO_RETRY_AFTER, &header_s);
    double named_s = cJSON_IsNumber(retry) ? retry->valuedouble : 0;
    int64_t seconds = DL_MAX((int64_t)header_s, named_s > 0 && named_s < RETRY_AFTER_MAX_S ? (int64_t)named_s : 0);
    result->retry_after_ns = DL_MIN(seconds, (int64_t)RETRY_AFTER_MAX_S) * DL_NS_PER_SECOND;
}

void op_call_read(struct op_call *call, CURLcode code, struct op_result *result, cJSON **tree)
{
    long status = 0;
    curl_easy_getinfo(call->transfer.easy, CURLINFO_RESPONSE_CODE, &status);
    *tree = NULL;
    *result = (struct op_result){
        .transport = (int)code,
        .status = (int)status,
        .tries = call->tries,
        .body = call->answer.data != NULL ? call->answer.data : "",
        .size = call->answer.size,
        .reason = "",
        .message = "",
    };
    if (code != CURLE_OK) {
        const char *why = call->curl_error[0] != 0 ? call->curl_error : curl_easy_strerror(code);
        result->rc = transport_rc(code);
        if (call->is_too_large) {
            why = "the answer is larger than is taken";
        }
        dl_err_set(&result->err, result->rc, "%s %.*s: %s", call->request.method, shown_size(call), call->path, why);
        return;
    }
    if (status < 200 || status > 299) {
        read_status(call, result, tree);
    }
    bool is_hopeless = is_unknown_field(result->status, result->message);
    result->rc = is_hopeless ? DL_EINVAL : status_rc(result->status, result->reason);
    if (result->rc != DL_OK) {
        const char *text = result->message[0] != 0 ? result->message : result->body;
        dl_err_set(&result->err, result->rc, "%s %.*s: %d %s: %.250s", call->request.method, shown_size(call),
                   call->path, result->status, result->reason, text);
    }
}

bool op_result_is_quota(const struct op_result *result)
{
    return result->status == 403 && strstr(result->message, "exceeded quota") != NULL;
}

bool op_call_may_retry(const struct op_call *call, const struct op_result *result)
{
    const struct op_request *request = &call->request;
    if (request->is_once || request->stream != NULL || call->is_foreign) {
        return false;
    }
    if (result->transport != 0) {
        return was_not_sent((CURLcode)result->transport)
                   ? result->rc == DL_ENET
                   : request->is_repeatable && (result->rc == DL_ENET || result->rc == DL_ETIMEOUT);
    }
    if (result->status == 429 || (result->status == 503 && result->retry_after_ns > 0)) {
        return true;
    }
    return request->is_repeatable && result->status >= 500 && result->rc != DL_EINVAL;
}
