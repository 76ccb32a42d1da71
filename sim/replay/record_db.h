/* The inside of sim_record: reading one tape. Included by record.c and record_db.c only. */
#ifndef DL_SIM_REPLAY_RECORD_DB_H
#define DL_SIM_REPLAY_RECORD_DB_H

#include "sim/replay/record.h"

/* Adds what the tape in `folder` says. Its shard is its own to say: the first that is read gives job and layout, the others
 * have to be of the same. */
DL_MUST_CHECK enum dl_rc sim_record_read(struct sim_record *record, const char *folder, struct dl_err *err);
/* Grows an array by one element of `size`; NULL: no memory. */
void *sim_record_grow(void **array, uint32_t *count, size_t size);

#endif
