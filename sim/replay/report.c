#include "sim/replay/report.h"

#include <inttypes.h>

#include "common/yaml.h"

void sim_report_text(struct dl_buf *out, const struct sim_record *record, const struct sim_replay_result *result,
                     double seconds)
{
    const struct sim_difference *difference = &result->difference;
    dl_buf_printf(out,
                  "%" PRIu64 " rounds of %u shard%s are the same to the bit (%u learner processes, %" PRIu64
                  " steps, %.1f s; at most %u processes and %" PRIu64 " MiB of versions at once)\n",
                  result->rounds, record->shards, record->shards == 1 ? "" : "s", result->processes, result->steps,
                  seconds, result->processes_peak, result->bytes_peak >> 20);
    if (result->left_out > 0) {
        dl_buf_printf(
            out,
            "%u of the processes lived across the checkpoint and were not executed: their pushes were merged as "
            "the syncer kept them\n",
            result->left_out);
    }
    if (result->unverified > 0) {
        dl_buf_printf(out, "%" PRIu64 " versions could not be verified: their pushes were not kept\n",
                      result->unverified);
    }
    if (!difference->found) {
        return;
    }
    dl_buf_printf(out, "first difference: round %" PRIu64 ", fragment %u, version %" PRIu64 ": %s\n", difference->round,
                  difference->fragment, difference->version, difference->what);
    if (difference->tensor[0] != 0) {
        dl_buf_printf(out, "  tensor %s, element %" PRIu64 "\n", difference->tensor, difference->index);
    }
    dl_buf_printf(out, "  tape:   %s\n  replay: %s\n", difference->tape, difference->replay);
}

void sim_report_json(struct dl_buf *out, const struct sim_record *record, const struct sim_replay_result *result,
                     double seconds, const char *error)
{
    const struct sim_difference *difference = &result->difference;
    dl_buf_printf(out,
                  "{\"replayedRounds\":%" PRIu64 ",\"replayMismatches\":%d,\"firstStates\":%" PRIu64
                  ",\"unverified\":%" PRIu64 ",\"leftOut\":%u,\"shards\":%u,\"processes\":%u,\"steps\":%" PRIu64
                  ",\"seconds\":%.3f,\"processesPeak\":%u,\"versionBytesPeak\":%" PRIu64,
                  result->rounds, difference->found ? 1 : 0, result->first_states, result->unverified, result->left_out,
                  record->shards, result->processes, result->steps, seconds, result->processes_peak,
                  result->bytes_peak);
    if (difference->found) {
        dl_buf_printf(out, ",\"difference\":{\"round\":%" PRIu64 ",\"fragment\":%u,\"version\":%" PRIu64 ",\"what\":",
                      difference->round, difference->fragment, difference->version);
        dl_json_string(out, difference->what);
        if (difference->tensor[0] != 0) {
            dl_buf_puts(out, ",\"tensor\":");
            dl_json_string(out, difference->tensor);
            dl_buf_printf(out, ",\"element\":%" PRIu64, difference->index);
        }
        dl_buf_puts(out, ",\"tape\":");
        dl_json_string(out, difference->tape);
        dl_buf_puts(out, ",\"replay\":");
        dl_json_string(out, difference->replay);
        dl_buf_puts(out, "}");
    }
    if (error != NULL) {
        dl_buf_puts(out, ",\"error\":");
        dl_json_string(out, error);
    }
    dl_buf_puts(out, "}\n");
}
