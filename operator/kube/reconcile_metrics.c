#include "operator/kube/reconcile_metrics.h"

void op_reconcile_count(struct op_reconcile_metrics *metrics, enum op_reconcile_result result, double seconds)
{
    metrics->results[result]++;
    dl_histogram_add(&metrics->seconds, seconds);
}

void op_reconcile_metrics_write(const struct op_reconcile_metrics *metrics, struct dl_metrics *out)
{
    static const char *const names[OP_RECONCILE_RESULTS] = {"success", "requeue", "requeue_after", "error"};
    dl_metrics_family(out, "controller_runtime_reconcile_total", "counter", "Reconciles by result.");
    for (int i = 0; i < OP_RECONCILE_RESULTS; i++) {
        dl_metrics_value(out, (double)metrics->results[i], "controller", metrics->controller, "result", names[i],
                         (char *)NULL);
    }
    dl_metrics_family(out, "controller_runtime_reconcile_errors_total", "counter", "Reconciles that failed.");
    dl_metrics_value(out, (double)metrics->results[OP_RECONCILE_ERROR], "controller", metrics->controller,
                     (char *)NULL);
    dl_metrics_family(out, "controller_runtime_active_workers", "gauge", "Reconciles under way.");
    dl_metrics_value(out, metrics->active_workers, "controller", metrics->controller, (char *)NULL);
    dl_metrics_family(out, "controller_runtime_max_concurrent_reconciles", "gauge", "Reconciles at once, at most.");
    dl_metrics_value(out, metrics->max_workers, "controller", metrics->controller, (char *)NULL);
    dl_metrics_family(out, "controller_runtime_reconcile_time_seconds", "histogram", "Time that a reconcile takes.");
    dl_metrics_histogram(out, &metrics->seconds, "controller", metrics->controller);
}
