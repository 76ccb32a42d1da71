/* wk_serve_http: the little of HTTP/1.1 that a learner's state server speaks: GET of two resources, with a range of bytes.
 *
 *     GET /v1/state              the manifest (manifest.h) of a snapshot, made when it is asked for
 *     GET /v1/state/<id>         its data; <id> in 16 hexadecimal digits; `Range: bytes=first-last` or `first-`
 *
 * Pure. */
#ifndef DL_WORKER_LINK_SERVE_HTTP_H
#define DL_WORKER_LINK_SERVE_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WK_HTTP_HEAD_MAX 4096 /* Bytes of a request's or an answer's head. */

struct wk_http_request {
    bool manifest; /* Else the data of snapshot `id`. */
    uint64_t id;
    bool ranged, open; /* `open`: to the end; `last` is then UINT64_MAX. */
    uint64_t first, last;
    bool close; /* Connection: close. */
};

/* Bytes of the head that `text` begins with, its empty line included; 0: it is not complete yet. */
size_t wk_http_head_bytes(const char *text, size_t size);

/* Reads a head of `size` bytes. 200: `*out` says what is wanted; otherwise the status to refuse it with. The token is
 * compared in time that does not depend on where it differs. */
int wk_http_request_parse(const char *head, size_t size, const char *token, struct wk_http_request *out);

struct wk_http_answer {
    int status;
    uint64_t length;       /* Content-Length */
    uint64_t first, total; /* Content-Range, of status 206. */
    bool close;
};

/* Reads an answer's head. False: it is none that this client can use. */
bool wk_http_answer_parse(const char *head, size_t size, struct wk_http_answer *out);

#endif
