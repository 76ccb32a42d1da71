/* sy_export: a job's weights out of the state folders of its shards, and the list of its checkpoints.
 *
 * Reads only: the syncers may run on, and merge, meanwhile. A checkpoint's files are pinned; of the newest versions one may
 * be replaced while it is read, and is then looked for again. Every file's checksums are verified. The whole model is held
 * in memory. Does I/O; one thread. */
#ifndef SY_EXPORT_EXPORT_H
#define SY_EXPORT_EXPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"

#define SY_EXPORT_CHECKPOINTS_MAX 1024
#define SY_EXPORT_TEXT_MAX 64

struct sy_export_options {
    const char *dirs[DL_SPEC_SHARDS_MAX]; /* State folders, by shard. */
    uint32_t dir_count;
    const char *checkpoint; /* Id ("3.1"), name, or vector clock ("v7.7.6"); NULL: the newest versions. */
    const char *out;        /* Folder that gets model.safetensors and config.json; made when absent. */
};

struct sy_export_checkpoint { /* Over all shards. */
    uint64_t id;
    char id_text[SY_EXPORT_TEXT_MAX];
    char name[SY_EXPORT_TEXT_MAX];
    int64_t wall_ns;
    uint64_t rounds, tokens; /* Rounds: summed over the shards. */
    uint32_t shards;         /* That have their part of it. */
    bool is_complete;        /* With what was known of the learners. */
    char *clock;             /* Versions by fragment, "v7.7.6"; "?" where a shard lacks its part. */
};

/* The newest first; the caller frees each `clock` and the array. DL_ENOTFOUND: a folder holds no state. */
DL_MUST_CHECK enum dl_rc sy_export_list(const struct sy_export_options *options, struct sy_export_checkpoint **out,
                                        uint32_t *count, struct dl_err *err);
void sy_export_free(struct sy_export_checkpoint *checkpoints, uint32_t count);

/* The job's name, and its layout (the caller's to free). DL_ENOTFOUND. */
DL_MUST_CHECK enum dl_rc sy_export_job(const struct sy_export_options *options, char name[DL_SPEC_NAME_MAX],
                                       struct dl_layout **layout, struct dl_err *err);
/* The id of `options->checkpoint`, and as text. DL_ENOTFOUND; with `whole`, also when a shard lacks its part. */
DL_MUST_CHECK enum dl_rc sy_export_find(const struct sy_export_options *options, bool whole, uint64_t *id,
                                        char name[SY_EXPORT_TEXT_MAX], struct dl_err *err);

/* Writes OUT/model.safetensors; metadata says job, checkpoint and versions. `clock` (malloc'ed) gets the latter. Beside it, when
 * the tensors are those of the job's model, the config.json with which transformers opens the folder; `*has_config`: it did.
 * DL_ENOTFOUND: no such checkpoint, or no state; DL_ECORRUPT: a damaged file, named. */
DL_MUST_CHECK enum dl_rc sy_export_weights(const struct sy_export_options *options, char **clock, bool *has_config,
                                           struct dl_err *err);

#endif
