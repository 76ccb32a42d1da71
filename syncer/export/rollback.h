/* sy_rollback: a job's state folders go back to a checkpoint, all shards (sy_store_roll_back).
 *
 * Writes, and fences off whatever syncer uses the folders: none may run, nor any learner of the job. Every file of the
 * checkpoint is verified in every shard before anything is changed; when it fails in the midst of it, the same call has to be
 * made again before the job goes on. Does I/O; one thread. Memory: the largest fragment with its outer-optimiser state. */
#ifndef SY_EXPORT_ROLLBACK_H
#define SY_EXPORT_ROLLBACK_H

#include "syncer/export/export.h"

/* `options->checkpoint` names it; `id`: its number as text. DL_ENOTFOUND, DL_ECORRUPT, DL_EIO, DL_EFULL. */
DL_MUST_CHECK enum dl_rc sy_rollback(const struct sy_export_options *options, char id[SY_EXPORT_TEXT_MAX],
                                     struct dl_err *err);

#endif
