/* op_path: the path of a Kubernetes request. It grows, percent-encodes every segment and value, and refuses empty
 * segments, "." and "..": a path that was cut short or lacks a name would address another object, or a whole
 * collection.
 *
 * Pure apart from memory; owner's thread; layer operator/kube. */
#ifndef OP_KUBE_PATH_H
#define OP_KUBE_PATH_H

#include <stdbool.h>

#include "common/buf.h"
#include "common/err.h"

#define OP_PATH_BYTES_MAX 8192
#define OP_NAME_MAX 253 /* Kubernetes' longest object name. */

/* A kind of object. Constants of this type live as long as the program. */
struct op_resource {
    const char *group;   /* "" is the core group. */
    const char *version; /* "v1" */
    const char *plural;  /* "pods" */
    const char *kind;    /* "Pod" */
    bool is_namespaced;
};

extern const struct op_resource op_res_pods, op_res_nodes, op_res_secrets, op_res_config_maps, op_res_services,
    op_res_claims, op_res_stateful_sets, op_res_disruption_budgets, op_res_network_policies, op_res_leases,
    op_res_events;

struct op_path {
    struct dl_buf buf;
    bool has_query;
    struct dl_err err; /* The first thing that was wrong. */
};

void op_path_init(struct op_path *path);
void op_path_release(struct op_path *path);

/* One more segment. */
void op_path_segment(struct op_path *path, const char *segment);
/* /api/v1/namespaces/NS/pods or /apis/GROUP/VERSION/...; `space` NULL: all namespaces (or a resource without). */
void op_path_collection(struct op_path *path, const struct op_resource *resource, const char *space);
/* The same and the name. A namespaced resource needs `space` here. */
void op_path_object(struct op_path *path, const struct op_resource *resource, const char *space, const char *name);
/* Appends ?key=value or &key=value, encoded. NULL or "" as `value`: nothing is appended. */
void op_path_query(struct op_path *path, const char *key, const char *value);

/* The whole text, borrowed until the path changes; DL_EINVAL with the reason when anything in it was refused. */
DL_MUST_CHECK enum dl_rc op_path_text(const struct op_path *path, const char **out, struct dl_err *err);

#endif
