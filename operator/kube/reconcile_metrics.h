/* op_reconcile_metrics: counts of reconciles under the names of controller-runtime (K12). Pure; owner's thread; layer
 * operator/kube. */
#ifndef OP_KUBE_RECONCILE_METRICS_H
#define OP_KUBE_RECONCILE_METRICS_H

#include <stdint.h>

#include "common/metrics.h"

enum op_reconcile_result { OP_RECONCILE_SUCCESS, OP_RECONCILE_REQUEUE, OP_RECONCILE_REQUEUE_AFTER, OP_RECONCILE_ERROR };
#define OP_RECONCILE_RESULTS 4

/* Zero-initialised with `controller` set. */
struct op_reconcile_metrics {
    const char *controller; /* Label; a constant, "decoupleddilocojob". */
    uint64_t results[OP_RECONCILE_RESULTS];
    uint32_t active_workers, max_workers;
    struct dl_histogram seconds;
};

void op_reconcile_count(struct op_reconcile_metrics *metrics, enum op_reconcile_result result, double seconds);

/* controller_runtime_reconcile_total{controller,result}, _errors_total, _time_seconds,
 * controller_runtime_active_workers, controller_runtime_max_concurrent_reconciles. */
void op_reconcile_metrics_write(const struct op_reconcile_metrics *metrics, struct dl_metrics *out);

#endif
