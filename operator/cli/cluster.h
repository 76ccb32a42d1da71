/* op_cluster: where a job in a cluster stands, as `kubectl` would ask: its object, and its syncers' status through the API
 * server (the right to get decoupleddilocojobs and pods/proxy is needed).
 *
 * One thread; every wait is bounded. Layer operator/cli. */
#ifndef OP_CLI_CLUSTER_H
#define OP_CLI_CLUSTER_H

#include "operator/kube/config.h"
#include "operator/local/view.h"

struct op_cluster; /* Opaque. */

/* A job's name out of "ddj/NAME"; NULL when it is not of that form. Borrowed. */
const char *op_cluster_job_name(const char *text);

/* `space` NULL: the namespace of the configuration, which is copied. Nothing is asked yet. */
DL_MUST_CHECK enum dl_rc op_cluster_open(const struct op_config *config, const char *space, const char *job,
                                         struct op_cluster **out, struct dl_err *err);
void op_cluster_close(struct op_cluster *cluster); /* NULL is fine. */

/* What the syncers say; when none answers, what the job's object says, as of a job that is over or suspended.
 * DL_ENOTFOUND: there is no such job. */
DL_MUST_CHECK enum dl_rc op_cluster_read(struct op_cluster *cluster, struct op_view *view, struct dl_err *err);

#endif
