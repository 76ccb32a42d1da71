/* sim_report: what a replay found, for people and for programs. Pure. */
#ifndef DL_SIM_REPLAY_REPORT_H
#define DL_SIM_REPLAY_REPORT_H

#include "common/buf.h"
#include "sim/replay/replay.h"

void sim_report_text(struct dl_buf *out, const struct sim_record *record, const struct sim_replay_result *result,
                     double seconds);
/* `error`: why it could not go on; NULL: it did. */
void sim_report_json(struct dl_buf *out, const struct sim_record *record, const struct sim_replay_result *result,
                     double seconds, const char *error);

#endif
