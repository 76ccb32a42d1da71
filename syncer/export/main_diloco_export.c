/* diloco-export: a job's weights, or the list of its checkpoints, from the state folders of its shards. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/time_text.h"
#include "common/version.h"
#include "syncer/export/export.h"
#include "syncer/export/rollback.h"

static const char help[] =
    "usage: diloco-export --state-dir DIR [--state-dir DIR ...] --out DIR [--checkpoint ID]\n"
    "       diloco-export --state-dir DIR [--state-dir DIR ...] --list | --roll-back ID\n"
    "\n"
    "Writes a job's global parameters as OUT/model.safetensors, and the config.json with which transformers opens OUT. "
    "The\n"
    "syncers may run on meanwhile: nothing is locked, nothing stops a merge.\n"
    "\n"
    "  --state-dir DIR    a shard's state folder; once a shard, in their order\n"
    "  --checkpoint ID    a checkpoint by id, name or vector clock; default: the newest versions\n"
    "  --out DIR          made when absent\n"
    "  --list             the checkpoints, newest first\n"
    "  --roll-back ID     the job's state becomes that of this checkpoint (`diloco run --resume RUN --checkpoint ID`); "
    "no\n"
    "                     syncer and no learner of it may run\n"
    "Exit status: 0 fine, 1 failed, 2 wrong arguments, or not there.\n";

static int complain(const struct dl_err *err)
{
    fprintf(stderr, "diloco-export: %s\n", err->text);
    return err->rc == DL_ENOTFOUND || err->rc == DL_EINVAL ? DL_EXIT_USAGE : DL_EXIT_FAILED;
}

static int usage(const char *text)
{
    fprintf(stderr, "diloco-export: %s (--help lists all options)\n", text);
    return DL_EXIT_USAGE;
}

static int list(const struct sy_export_options *options)
{
    struct sy_export_checkpoint *all = NULL;
    uint32_t count = 0;
    struct dl_err err;
    if (sy_export_list(options, &all, &count, &err) != DL_OK) {
        return complain(&err);
    }
    if (count == 0) {
        puts("no checkpoints");
    } else {
        printf("%-8s %-20s %-20s %10s %14s %-9s %s\n", "ID", "NAME", "TIME", "ROUNDS", "TOKENS", "STATE", "VERSIONS");
    }
    for (uint32_t i = 0; i < count; i++) {
        char when[DL_TIME_TEXT_MAX];
        const char *state = all[i].shards < options->dir_count ? "partial" : all[i].is_complete ? "complete" : "saved";
        printf("%-8s %-20s %-20s %10" PRIu64 " %14" PRIu64 " %-9s %s\n", all[i].id_text,
               all[i].name[0] != 0 ? all[i].name : "-", dl_time_text(all[i].wall_ns, 0, when), all[i].rounds,
               all[i].tokens, state, all[i].clock != NULL ? all[i].clock : "?");
    }
    sy_export_free(all, count);
    return DL_EXIT_OK;
}

static int export(const struct sy_export_options *options)
{
    char *clock = NULL;
    bool has_config = false;
    struct dl_err err;
    if (sy_export_weights(options, &clock, &has_config, &err) != DL_OK) {
        free(clock);
        return complain(&err);
    }
    printf("%s/model.safetensors: versions %s%s\n", options->out, clock,
           has_config ? "" : " (without config.json: the tensors are not those of the job's model)");
    free(clock);
    return DL_EXIT_OK;
}

static int roll_back(const struct sy_export_options *options)
{
    char id[SY_EXPORT_TEXT_MAX];
    struct dl_err err;
    if (sy_rollback(options, id, &err) != DL_OK) {
        return complain(&err);
    }
    printf("rolled back to checkpoint %s\n", id);
    return DL_EXIT_OK;
}

int main(int argc, char **argv)
{
    enum { STATE = 256, CHECKPOINT, OUT, LIST, ROLL_BACK, HELP, VERSION };
    static const struct option names[] = {
        {"state-dir", required_argument, NULL, STATE},
        {"checkpoint", required_argument, NULL, CHECKPOINT},
        {"out", required_argument, NULL, OUT},
        {"list", no_argument, NULL, LIST},
        {"roll-back", required_argument, NULL, ROLL_BACK},
        {"help", no_argument, NULL, HELP},
        {"version", no_argument, NULL, VERSION},
        {NULL, 0, NULL, 0},
    };
    static struct sy_export_options options;
    bool is_list = false, is_rollback = false;
    for (int opt = getopt_long(argc, argv, "", names, NULL); opt != -1;
         opt = getopt_long(argc, argv, "", names, NULL)) {
        switch (opt) {
        case STATE:
            if (options.dir_count == DL_SPEC_SHARDS_MAX) {
                return usage("too many --state-dir");
            }
            options.dirs[options.dir_count++] = optarg;
            break;
        case CHECKPOINT: options.checkpoint = optarg; break;
        case OUT: options.out = optarg; break;
        case LIST: is_list = true; break;
        case ROLL_BACK:
            is_rollback = true;
            options.checkpoint = optarg;
            break;
        case HELP: fputs(help, stdout); return DL_EXIT_OK;
        case VERSION: puts("diloco-export " DL_VERSION); return DL_EXIT_OK;
        default: return usage("the arguments are not understood");
        }
    }
    if (optind < argc || options.dir_count == 0 || is_list + is_rollback + (options.out != NULL) != 1) {
        return usage("--state-dir is needed, and one of --out, --list and --roll-back");
    }
    return is_list ? list(&options) : is_rollback ? roll_back(&options) : export(&options);
}
