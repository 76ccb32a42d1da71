/* diloco-replay: executes a recorded run again and says where it first differs. */
#include <cblas.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/buf.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/mem.h"
#include "common/version.h"
#include "sim/replay/folders.h"
#include "sim/replay/replay.h"
#include "sim/replay/report.h"
#include "worker/model/blas.h"
#include "worker/train/trainer.h"

#define AGAIN_ENV "DILOCO_REPLAY_KERNELS" /* In the restarted process. */
#define REPORT_BYTES_MAX 65536
#define PROGRESS_NS (2 * DL_NS_PER_SECOND)

static const char help[] =
    "diloco replay: executes a recorded run again, in one process, and compares every version with the tape\n"
    "\n"
    "  diloco replay RUN [options]           RUN: a run folder, or the state folder of every shard\n"
    "\n"
    "  --until ROUND       end after this round\n"
    "  --from CHECKPOINT   begin with the versions of a checkpoint (its name or number); what learners pushed that "
    "lived\n"
    "                      across it is merged as it was kept (syncer.keepPushes), and how many they are is told\n"
    "  --verify-only       only the merges, from the pushes that the syncer kept (syncer.keepPushes)\n"
    "  --threads N         compute threads (default: the cores); the result does not depend on it\n"
    "  --json              the result as JSON\n"
    "  --quiet             no progress\n"
    "\n"
    "Exit codes: 0 all versions are the same to the bit, 1 a difference was found, 2 the run cannot be executed "
    "again.\n";

struct arguments {
    struct sim_replay_options options;
    bool json, quiet, help, version;
    const char *from;
    char **folders;
    uint32_t folder_count;
};

static bool parse_number(const char *text, uint64_t most, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && end != text && *end == 0 && text[0] != '-' && *out <= most;
}

/* False: said what is wrong. */
static bool parse(int argc, char **argv, struct arguments *out)
{
    enum { UNTIL = 256, FROM, VERIFY_ONLY, THREADS, JSON, QUIET, HELP, VERSION };
    static const struct option options[] = {{"until", required_argument, NULL, UNTIL},
                                            {"from", required_argument, NULL, FROM},
                                            {"verify-only", no_argument, NULL, VERIFY_ONLY},
                                            {"threads", required_argument, NULL, THREADS},
                                            {"json", no_argument, NULL, JSON},
                                            {"quiet", no_argument, NULL, QUIET},
                                            {"help", no_argument, NULL, HELP},
                                            {"version", no_argument, NULL, VERSION},
                                            {NULL, 0, NULL, 0}};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t threads = (uint64_t)DL_MIN(DL_MAX(cores, 1), 64);
    *out = (struct arguments){.options = {.until = UINT64_MAX}};
    for (int c = getopt_long(argc, argv, "h", options, NULL); c != -1;
         c = getopt_long(argc, argv, "h", options, NULL)) {
        bool good = true;
        switch (c) {
        case UNTIL: good = parse_number(optarg, UINT64_MAX, &out->options.until); break;
        case FROM: out->from = optarg; break;
        case VERIFY_ONLY: out->options.verify_only = true; break;
        case THREADS: good = parse_number(optarg, 64, &threads) && threads > 0; break;
        case JSON: out->json = true; break;
        case QUIET: out->quiet = true; break;
        case 'h':
        case HELP: out->help = true; break;
        case VERSION: out->version = true; break;
        default: return false;
        }
        if (!good) {
            fprintf(stderr, "diloco replay: '%s' is not a number that is possible there\n", optarg);
            return false;
        }
    }
    out->options.threads = (uint32_t)threads;
    out->folders = argv + optind;
    out->folder_count = (uint32_t)(argc - optind);
    if (out->folder_count == 0 && !out->help && !out->version) {
        fprintf(stderr, "diloco replay: give a run folder; see diloco replay --help\n");
        return false;
    }
    return true;
}

/* --- kernels --- */

static const char *trainer_of(const struct sim_record *record)
{
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        if (record->incarnations[i].trainer[0] != 0) {
            return record->incarnations[i].trainer;
        }
    }
    return "";
}

/* Products are computed by the kernels that the learners used: OpenBLAS chooses when a program starts, so that this one may
 * have to start again. Only returns when it does not. */
static void use_kernels_of(const struct sim_record *record, char **argv)
{
    char core[32] = "", wanted[DL_WIRE_TRAINER_MAX];
    snprintf(wanted, sizeof wanted, "%s", trainer_of(record));
    /* "builtin 1, OpenBLAS 0.3.21 SkylakeX, avx512" */
    char *end = strrchr(wanted, ',');
    if (end != NULL) {
        *end = 0;
        const char *begin = strrchr(wanted, ' ');
        snprintf(core, sizeof core, "%s", begin == NULL ? "" : begin + 1);
    }
    if (core[0] == 0 || strcmp(core, openblas_get_corename()) == 0 || getenv(AGAIN_ENV) != NULL) {
        return;
    }
    setenv("OPENBLAS_CORETYPE", core, 1);
    setenv(AGAIN_ENV, core, 1);
    execv("/proc/self/exe", argv);
}

static void warn_of_trainers(const struct sim_record *record)
{
    char ours[WK_TRAINER_NAME_MAX];
    wk_trainer_name(ours);
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        const struct sim_incarnation_record *who = &record->incarnations[i];
        if (who->trainer[0] != 0 && strcmp(who->trainer, ours) != 0) {
            fprintf(stderr,
                    "diloco replay: learner %" PRId64 " computed with \"%s\", this machine does with \"%s\": bits may "
                    "differ for that alone\n",
                    who->learner, who->trainer, ours);
            return;
        }
    }
}

/* --- running --- */

struct progress {
    int64_t said_ns;
};

static void say_progress(void *context, uint64_t done, uint64_t of)
{
    struct progress *progress = context;
    int64_t now_ns = dl_now_ns();
    if (now_ns - progress->said_ns >= PROGRESS_NS) {
        fprintf(stderr, "%" PRIu64 " of %" PRIu64 " versions\n", done, of);
        progress->said_ns = now_ns;
    }
}

static int replay(struct sim_record *record, struct arguments *arguments)
{
    struct progress progress = {.said_ns = dl_now_ns()};
    struct dl_err err;
    struct sim_replay_result result;
    if (!arguments->quiet) {
        arguments->options.progress = say_progress;
        arguments->options.context = &progress;
    }
    int64_t start_ns = dl_now_ns();
    enum dl_rc rc = sim_replay_run(record, &arguments->options, &result, &err);
    struct dl_buf text;
    dl_buf_init(&text, REPORT_BYTES_MAX);
    double seconds = (double)(dl_now_ns() - start_ns) / 1e9;
    if (arguments->json) {
        sim_report_json(&text, record, &result, seconds, rc == DL_OK ? NULL : err.text);
    } else if (rc == DL_OK) {
        sim_report_text(&text, record, &result, seconds);
    }
    DL_AUTO_FREE char *report = dl_buf_take(&text);
    fputs(report == NULL ? "" : report, stdout);
    dl_buf_release(&text);
    if (rc != DL_OK) {
        fprintf(stderr, "diloco replay: after %" PRIu64 " rounds that agree: %s\n", result.rounds, err.text);
        return DL_EXIT_USAGE;
    }
    if (arguments->options.verify_only && result.rounds == 0 && !result.difference.found) {
        fprintf(stderr, "diloco replay: no pushes were kept: set syncer.keepPushes, or leave out --verify-only\n");
        return DL_EXIT_USAGE;
    }
    return result.difference.found ? DL_EXIT_FAILED : DL_EXIT_OK;
}

int main(int argc, char **argv)
{
    struct arguments arguments;
    struct sim_folders folders;
    struct dl_err err;
    if (!parse(argc, argv, &arguments)) {
        return DL_EXIT_USAGE;
    }
    if (arguments.help || arguments.version) {
        fputs(arguments.help ? help : "diloco-replay " DL_VERSION "\n", stdout);
        return DL_EXIT_OK;
    }
    enum dl_rc rc = sim_folders_find(arguments.folders, arguments.folder_count, &folders, &err);
    const char *paths[DL_SPEC_SHARDS_MAX];
    for (uint32_t i = 0; rc == DL_OK && i < folders.count; i++) {
        paths[i] = folders.paths[i];
    }
    struct sim_record *record = NULL;
    if (rc == DL_OK) {
        rc = sim_record_open(paths, folders.count, &record, &err);
    }
    static uint64_t from[DL_SPEC_FRAGMENTS_MAX];
    if (rc == DL_OK && arguments.from != NULL) {
        rc = sim_record_checkpoint(record, arguments.from, from, &err);
        arguments.options.from = from;
    }
    if (rc != DL_OK) {
        fprintf(stderr, "diloco replay: %s\n", err.text);
        sim_record_free(record);
        return DL_EXIT_USAGE;
    }
    int code = DL_EXIT_USAGE;
    if (!arguments.options.verify_only) {
        use_kernels_of(record, argv);
        setenv(WK_BLAS_KEEP_ENV, "1", 1);
        struct wk_blas_report blas;
        rc = wk_blas_init(argc, argv, &blas, &err);
        warn_of_trainers(record);
    }
    if (rc == DL_OK) {
        code = replay(record, &arguments);
    } else {
        fprintf(stderr, "diloco replay: %s\n", err.text);
    }
    sim_record_free(record);
    return code;
}
