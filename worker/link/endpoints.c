#include "worker/link/endpoints.h"

#include <string.h>

static bool is_port(const char *text, size_t length)
{
    unsigned value = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        value = value * 10 + (unsigned)(text[i] - '0');
    }
    return length >= 1 && length <= 5 && value >= 1 && value <= 65535;
}

static enum dl_rc wrong(struct dl_err *err, const char *text, size_t length, const char *what)
{
    return dl_err_set(err, DL_EINVAL, "endpoint \"%.*s\": %s (expected ws://host:port or wss://host:port)",
                      (int)(length > 200 ? 200 : length), text, what);
}

static enum dl_rc parse_one(const char *text, size_t length, struct wk_endpoint *out, struct dl_err *err)
{
    const char *at = text, *end = text + length;
    if (length > 5 && memcmp(at, "ws://", 5) == 0) {
        out->tls = false;
        at += 5;
    } else if (length > 6 && memcmp(at, "wss://", 6) == 0) {
        out->tls = true;
        at += 6;
    } else {
        return wrong(err, text, length, "unknown scheme");
    }
    if (end > at && end[-1] == '/') {
        end--;
    }
    const char *host = at, *host_end = NULL;
    if (at < end && *at == '[') {
        host = at + 1;
        host_end = memchr(host, ']', (size_t)(end - host));
        at = host_end == NULL ? NULL : host_end + 1;
    } else {
        host_end = at = memchr(at, ':', (size_t)(end - at));
    }
    if (at == NULL || at == end || *at != ':' || host_end == host) {
        return wrong(err, text, length, "host or port is missing");
    }
    size_t host_length = (size_t)(host_end - host), port_length = (size_t)(end - at - 1);
    if (host_length >= sizeof out->host || !is_port(at + 1, port_length)) {
        return wrong(err, text, length, "host too long or port not a number from 1 to 65535");
    }
    for (size_t i = 0; i < host_length; i++) {
        if ((unsigned char)host[i] <= 0x20 || host[i] == '/' || host[i] == '@') {
            return wrong(err, text, length, "host has a character that no host has");
        }
    }
    memcpy(out->host, host, host_length);
    out->host[host_length] = 0;
    memcpy(out->port, at + 1, port_length);
    out->port[port_length] = 0;
    return DL_OK;
}

enum dl_rc wk_endpoints_parse(const char *text, struct wk_endpoint *out, uint32_t *count, struct dl_err *err)
{
    uint32_t found = 0;
    for (const char *at = text;; at++) {
        const char *end = strchr(at, ',');
        size_t length = end == NULL ? strlen(at) : (size_t)(end - at);
        if (found == DL_SPEC_SHARDS_MAX) {
            return dl_err_set(err, DL_EINVAL, "endpoints: more than %d", DL_SPEC_SHARDS_MAX);
        }
        enum dl_rc rc = parse_one(at, length, &out[found], err);
        if (rc != DL_OK) {
            return rc;
        }
        found++;
        if (end == NULL) {
            break;
        }
        at = end;
    }
    *count = found;
    return DL_OK;
}
