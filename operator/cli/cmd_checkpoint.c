/* diloco checkpoint, diloco export: consistent states of a run, named, listed, removed, written as safetensors. */
#include <cjson/cJSON.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/mem.h"
#include "common/spec.h"
#include "operator/cli/cli.h"
#include "operator/local/checkpoints.h"
#include "operator/local/exporter.h"
#include "operator/local/rundir.h"
#include "operator/local/shards.h"

#define WAIT_SECONDS 60 /* For a checkpoint to be durable in every shard. */
#define POLL_NS (50 * DL_NS_PER_MS)

static const char checkpoint_help[] =
    "diloco checkpoint [RUN] [--name NAME]: a consistent state over all shards of a run that goes on, kept until "
    "removed.\n"
    "diloco checkpoint [RUN] --list: what there is, newest first; also of a run that has ended.\n"
    "diloco checkpoint [RUN] --remove ID|NAME: what only it keeps is removed; while the run goes on.";
static const char export_help[] =
    "diloco export [RUN] --out DIR [--checkpoint ID]: writes the global parameters as DIR/model.safetensors, with the\n"
    "config.json that transformers needs, of a checkpoint (id, name or vector clock), else of now. Nothing stops "
    "meanwhile; a run that has ended is fine, too.";

struct arguments {
    const char *run, *name, *remove, *out, *checkpoint;
    bool is_list, is_help;
};

static bool parse(int argc, char **argv, struct arguments *out)
{
    enum { NAME = 256, LIST, REMOVE, OUT, CHECKPOINT, HELP };
    static const struct option options[] = {
        {"name", required_argument, NULL, NAME},
        {"list", no_argument, NULL, LIST},
        {"remove", required_argument, NULL, REMOVE},
        {"out", required_argument, NULL, OUT},
        {"help", no_argument, NULL, HELP},
        {"checkpoint", required_argument, NULL, CHECKPOINT},
        {NULL, 0, NULL, 0},
    };
    *out = (struct arguments){.name = ""};
    opterr = 0;
    for (int found; (found = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (found) {
        case NAME: out->name = optarg; break;
        case LIST: out->is_list = true; break;
        case REMOVE: out->remove = optarg; break;
        case OUT: out->out = optarg; break;
        case CHECKPOINT: out->checkpoint = optarg; break;
        case 'h':
        case HELP: out->is_help = true; return true;
        default: return false;
        }
    }
    out->run = optind < argc ? argv[optind++] : NULL;
    return optind == argc;
}

static int export_or_fail(const char *command, const struct op_rundir *dir, const char *const *more)
{
    struct dl_err err = {.text = ""};
    int code = op_export_run(dir, more, &err);
    return code >= 0 ? code : op_cli_fail(command, &err);
}

/* --- making one ------------------------------------------------------------------------------------------------------- */

/* Whether the shard has it durable; DL_EINVAL: it has given it up. */
static enum dl_rc look(const struct op_rundir *dir, uint32_t shard, const char *id, bool *is_saved, bool *is_complete,
                       struct dl_err *err)
{
    DL_AUTO_FREE char *text = NULL;
    enum dl_rc rc = op_shard_ask(dir, shard, false, "/checkpoints", &text, err);
    if (rc != DL_OK) {
        return rc;
    }
    cJSON *root = cJSON_Parse(text);
    const char *state = NULL;
    for (cJSON *one = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "checkpoints"), 0); one != NULL; one = one->next) {
        const char *its = cJSON_GetStringValue(cJSON_GetObjectItem(one, "id"));
        state = its != NULL && strcmp(its, id) == 0 ? cJSON_GetStringValue(cJSON_GetObjectItem(one, "state")) : state;
    }
    *is_saved = *is_saved && state != NULL && strcmp(state, "saving") != 0;
    *is_complete = *is_complete && state != NULL && strcmp(state, "complete") == 0;
    rc = state != NULL ? DL_OK
                       : dl_err_set(err, DL_EINVAL, "shard %u did not keep checkpoint %s; its log says why", shard, id);
    cJSON_Delete(root);
    return rc;
}

/* Durable everywhere; with its learners when they answer soon. */
static enum dl_rc await(const struct op_rundir *dir, uint32_t shards, const char *id, struct dl_err *err)
{
    int64_t begin_ns = dl_now_ns();
    for (;;) {
        bool is_saved = true, is_complete = true;
        enum dl_rc rc = DL_OK;
        for (uint32_t s = 0; rc == DL_OK && s < shards; s++) {
            rc = look(dir, s, id, &is_saved, &is_complete, err);
        }
        int64_t waited_ns = dl_now_ns() - begin_ns;
        if (rc != DL_OK || is_complete || (is_saved && waited_ns >= WAIT_SECONDS / 6 * DL_NS_PER_SECOND)) {
            return rc;
        }
        if (waited_ns >= WAIT_SECONDS * DL_NS_PER_SECOND) {
            return dl_err_set(err, DL_ETIMEOUT, "checkpoint %s is not durable after %d s: see the syncers' logs", id,
                              WAIT_SECONDS);
        }
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
}

static enum dl_rc make(const struct op_rundir *dir, const char *name, char id[OP_CHECKPOINT_ID_BYTES],
                       struct dl_err *err)
{
    char path[256];
    DL_AUTO_FREE char *answer = NULL;
    snprintf(path, sizeof path, "/checkpoint?name=%.128s", name);
    enum dl_rc rc = op_shard_ask(dir, 0, true, path, &answer, err);
    if (rc != DL_OK) {
        return rc;
    }
    snprintf(id, OP_CHECKPOINT_ID_BYTES, "%.*s", (int)strcspn(answer, "\r\n"), answer);
    uint32_t shards = op_shards_count(dir);
    snprintf(path, sizeof path, "/checkpoint?id=%s", id);
    for (uint32_t s = 1; rc == DL_OK && s < shards; s++) {
        DL_AUTO_FREE char *ignored = NULL;
        rc = op_shard_ask(dir, s, true, path, &ignored, err); /* It may have heard from a learner already. */
    }
    return rc == DL_OK ? await(dir, shards, id, err) : rc;
}

static enum dl_rc drop(const struct op_rundir *dir, const char *wanted, struct dl_err *err)
{
    char path[256], id[OP_CHECKPOINT_ID_BYTES];
    DL_AUTO_FREE char *list = NULL;
    enum dl_rc rc = op_shard_ask(dir, 0, false, "/checkpoints", &list, err);
    rc = rc == DL_OK ? op_checkpoint_find(list, wanted, id, err) : rc;
    snprintf(path, sizeof path, "/unpin?id=%.64s", rc == DL_OK ? id : "");
    for (uint32_t s = 0; rc == DL_OK && s < op_shards_count(dir); s++) {
        DL_AUTO_FREE char *ignored = NULL;
        rc = op_shard_ask(dir, s, true, path, &ignored, err);
    }
    return rc;
}

int op_cmd_checkpoint(int argc, char **argv)
{
    struct arguments arguments;
    struct op_rundir dir;
    struct dl_err err = {.text = ""};
    if (!parse(argc, argv, &arguments) || arguments.out != NULL || arguments.checkpoint != NULL) {
        return op_cli_usage("checkpoint", "name one run, and --name, --list or --remove");
    }
    if (arguments.is_help) {
        puts(checkpoint_help);
        return DL_EXIT_OK;
    }
    enum dl_rc rc = op_rundir_open(arguments.run, &dir, &err);
    if (rc == DL_OK && arguments.is_list) {
        return export_or_fail("checkpoint", &dir, (const char *const[]){"--list", NULL});
    }
    char id[OP_CHECKPOINT_ID_BYTES] = "";
    if (rc == DL_OK && arguments.remove != NULL) {
        rc = drop(&dir, arguments.remove, &err);
    } else if (rc == DL_OK) {
        rc = make(&dir, arguments.name, id, &err);
    }
    if (rc != DL_OK) {
        return op_cli_fail("checkpoint", &err);
    }
    printf(id[0] != 0 ? "checkpoint %s\n" : "removed%s\n", id);
    return DL_EXIT_OK;
}

int op_cmd_export(int argc, char **argv)
{
    struct arguments arguments;
    struct op_rundir dir;
    struct dl_err err = {.text = ""};
    if (!parse(argc, argv, &arguments) || arguments.is_list || arguments.remove != NULL ||
        (arguments.out == NULL && !arguments.is_help)) {
        return op_cli_usage("export", "name one run, --out, and --checkpoint when it is not to be the newest state");
    }
    if (arguments.is_help) {
        puts(export_help);
        return DL_EXIT_OK;
    }
    if (op_rundir_open(arguments.run, &dir, &err) != DL_OK) {
        return op_cli_fail("export", &err);
    }
    /* While the run goes on, "now" is a cut of its own; at rest, whatever is there is one. */
    char id[OP_CHECKPOINT_ID_BYTES] = "";
    bool is_own = arguments.checkpoint == NULL && make(&dir, "", id, &err) == DL_OK;
    const char *checkpoint = is_own ? id : arguments.checkpoint;
    int code = export_or_fail(
        "export", &dir,
        (const char *const[]){"--out", arguments.out, checkpoint != NULL ? "--checkpoint" : NULL, checkpoint, NULL});
    if (is_own && drop(&dir, id, &err) != DL_OK) {
        fprintf(stderr, "diloco export: checkpoint %s stays: %s\n", id, err.text);
    }
    return code;
}
