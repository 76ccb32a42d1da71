#include "operator/kube/timestamp.h"

#include <stdio.h>
#include <time.h>

#define NS_PER_SECOND INT64_C(1000000000)

static struct tm calendar(int64_t wall_ns)
{
    time_t seconds = (time_t)(wall_ns / NS_PER_SECOND);
    struct tm parts = {0};
    gmtime_r(&seconds, &parts);
    return parts;
}

const char *op_time_text(int64_t wall_ns, char text[static OP_TIME_TEXT_MAX])
{
    struct tm parts = calendar(wall_ns);
    strftime(text, OP_TIME_TEXT_MAX, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

const char *op_time_micro_text(int64_t wall_ns, char text[static OP_TIME_TEXT_MAX])
{
    struct tm parts = calendar(wall_ns);
    size_t used = strftime(text, OP_TIME_TEXT_MAX, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + used, OP_TIME_TEXT_MAX - used, ".%06dZ", (int)(wall_ns % NS_PER_SECOND / 1000));
    return text;
}

enum dl_rc op_time_parse(const char *text, int64_t *wall_ns, struct dl_err *err)
{
    struct tm parts = {0};
    const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &parts);
    int64_t fraction_ns = 0, offset_s = 0;
    if (rest != NULL && *rest == '.') {
        int64_t unit = NS_PER_SECOND / 10;
        for (rest++; *rest >= '0' && *rest <= '9'; rest++, unit /= 10) {
            fraction_ns += unit * (*rest - '0');
        }
    }
    if (rest != NULL && (*rest == '+' || *rest == '-')) {
        int hours = 0, minutes = 0, used = 0;
        if (sscanf(rest + 1, "%2d:%2d%n", &hours, &minutes, &used) != 2 || rest[1 + used] != 0) {
            rest = NULL;
        } else {
            offset_s = (*rest == '-' ? -1 : 1) * (hours * 3600 + minutes * 60);
        }
    } else if (rest != NULL && (rest[0] != 'Z' || rest[1] != 0)) {
        rest = NULL;
    }
    if (rest == NULL) {
        return dl_err_set(err, DL_EINVAL, "'%.60s' is not a time such as 2026-01-02T03:04:05Z", text);
    }
    *wall_ns = ((int64_t)timegm(&parts) - offset_s) * NS_PER_SECOND + fraction_ns;
    return DL_OK;
}
