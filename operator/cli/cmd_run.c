#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/cli/cli.h"
#include "operator/local/estimate.h"
#include "operator/local/render.h"
#include "operator/local/supervisor.h"

static const char help[] =
    "diloco run JOB.yaml, diloco run --resume RUN [JOB.yaml]: trains the job on this machine, as one syncer process a "
    "shard, its learners and an "
    "evaluator.\n"
    "\n"
    "  --dir RUN            folder of the run (default: the next free runs/<job>-<n>); never overwritten\n"
    "  --resume RUN         go on in this run folder, where it was: same token and state; JOB.yaml may be left out, "
    "or\n"
    "                       change what can be changed (learners, budget, ...; docs/job-reference.md)\n"
    "  --checkpoint ID      with --resume: first back to this checkpoint of it (id, name or vector clock); what came\n"
    "                       after it stays in the tape and counts no longer\n"
    "  --tls                over TLS 1.3, with certificates made for this run (RUN/tls)\n"
    "  --no-tty             plain lines instead of the live view\n"
    "  --chaos LIST         disturbances by progress of the budget, e.g. kill@35%:2,join@55%\n"
    "                       kill@P%[:ID] kill-syncer@P%[:SHARD] join@P%[:COUNT] leave@P%[:COUNT]\n"
    "  --sample TEXT        at the end, print what the trained model makes of this beginning\n"
    "  --results FILE       measures of the run as JSON\n"
    "  --log-level LEVEL    of the processes: debug, info (default), warn, error\n"
    "  --learner-arg ARG    appended to each learner's command line; may be repeated\n"
    "  --bin-dir DIR        where diloco-syncer and diloco-worker are (default: beside this program)\n"
    "\n"
    "Ctrl-C ends the job in order (last merge, export of the weights), a second one kills everything at once. While it "
    "runs:\n"
    "`diloco status`, `diloco top`, `diloco scale RUN N`, `diloco kill RUN learner ID`. What is left: RUN/report.md.\n";

int op_cli_fail(const char *command, const struct dl_err *err)
{
    fprintf(stderr, "diloco %s: %s\n", command, err->text);
    /* What cannot be set up is the input's fault; what breaks down later is not. */
    switch (err->rc) {
    case DL_EINVAL:
    case DL_ENOTFOUND:
    case DL_EEXISTS:
    case DL_EDENIED:
    case DL_EUNSUPPORTED: return DL_EXIT_USAGE;
    case DL_ETIMEOUT: return DL_EXIT_TIMEOUT;
    case DL_OK:
    case DL_AGAIN:
    case DL_ENOMEM:
    case DL_EIO:
    case DL_ENET:
    case DL_ECONFLICT:
    case DL_EGONE:
    case DL_EPROTO:
    case DL_ECORRUPT:
    case DL_EFULL: break;
    }
    return DL_EXIT_FAILED;
}

int op_cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;
    fprintf(stderr, "diloco %s: ", command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "; see `diloco %s --help`\n", command);
    return DL_EXIT_USAGE;
}

struct arguments {
    const char *job, *bin_dir, *chaos; /* `job` NULL: that of the run that is resumed. */
    struct op_run_options run;
    bool is_help;
};

static int parse(int argc, char **argv, struct arguments *out)
{
    enum {
        DIR_OPTION = 256,
        RESUME,
        CHECKPOINT,
        NO_TTY,
        CHAOS,
        SAMPLE,
        RESULTS,
        LOG_LEVEL,
        LEARNER_ARG,
        BIN_DIR,
        TLS,
        HELP
    };
    static const struct option options[] = {
        {"dir", required_argument, NULL, DIR_OPTION},
        {"resume", required_argument, NULL, RESUME},
        {"checkpoint", required_argument, NULL, CHECKPOINT},
        {"no-tty", no_argument, NULL, NO_TTY},
        {"chaos", required_argument, NULL, CHAOS},
        {"sample", required_argument, NULL, SAMPLE},
        {"results", required_argument, NULL, RESULTS},
        {"log-level", required_argument, NULL, LOG_LEVEL},
        {"bin-dir", required_argument, NULL, BIN_DIR},
        {"learner-arg", required_argument, NULL, LEARNER_ARG},
        {"tls", no_argument, NULL, TLS},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    enum dl_log_level level;
    struct dl_err err = {.text = ""};
    *out = (struct arguments){.run = {.log_level = "info"}};
    opterr = 0;
    for (int found; (found = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (found) {
        case DIR_OPTION: out->run.dir = optarg; break;
        case RESUME: out->run.resume = optarg; break;
        case CHECKPOINT: out->run.checkpoint = optarg; break;
        case NO_TTY: out->run.plain = true; break;
        case CHAOS: out->chaos = optarg; break;
        case SAMPLE: out->run.sample = optarg; break;
        case RESULTS: out->run.results = optarg; break;
        case LOG_LEVEL: out->run.log_level = optarg; break;
        case TLS: out->run.tls = true; break;
        case BIN_DIR: out->bin_dir = optarg; break;
        case LEARNER_ARG:
            if (out->run.learner_argument_count == OP_LEARNER_ARGUMENTS_MAX) {
                return op_cli_usage("run", "--learner-arg at most %d times", OP_LEARNER_ARGUMENTS_MAX);
            }
            out->run.learner_arguments[out->run.learner_argument_count++] = optarg;
            break;
        case 'h':
        case HELP: out->is_help = true; return DL_EXIT_OK;
        default: return op_cli_usage("run", "unknown option or missing value: %s", argv[optind - 1]);
        }
    }
    if (dl_log_level_parse(out->run.log_level, &level, &err) != DL_OK) {
        return op_cli_usage("run", "%s", err.text);
    }
    if (out->run.resume != NULL && out->run.dir != NULL) {
        return op_cli_usage("run", "--resume goes on in its run folder: leave --dir out");
    }
    if (out->run.checkpoint != NULL && out->run.resume == NULL) {
        return op_cli_usage("run", "--checkpoint takes a run back to a state of its own: name it with --resume");
    }
    if (out->run.resume != NULL && optind == argc) {
        return DL_EXIT_OK;
    }
    if (optind + 1 != argc) {
        return op_cli_usage("run", optind == argc ? "which job? Name a manifest, e.g. crds/samples/demo.yaml"
                                                  : "one job at a time");
    }
    out->job = argv[optind];
    return DL_EXIT_OK;
}

static void print_warnings(const struct dl_spec_warnings *warnings)
{
    for (uint32_t i = 0; i < warnings->count; i++) {
        fprintf(stderr, "warning: %s\n", warnings->text[i]);
    }
}

/* The results are asked for by someone who will look for them: a path that cannot be written is found before the run.
 */
static enum dl_rc check_results(const char *path, struct dl_err *err)
{
    FILE *file = path != NULL ? fopen(path, "ae") : NULL;
    if (path != NULL && file == NULL) {
        return dl_err_set(err, DL_EDENIED, "--results %s cannot be written: name a file in a folder that exists", path);
    }
    if (file != NULL) {
        fclose(file);
    }
    return DL_OK;
}

/* The job that a run was begun with, and that a manifest may change in parts only. */
static enum dl_rc load_job(const struct arguments *arguments, struct dl_spec **out, struct dl_spec_warnings *warnings,
                           struct dl_err *err)
{
    if (arguments->run.resume == NULL) {
        return dl_spec_load(arguments->job, out, warnings, err);
    }
    char path[OP_PATH_MAX];
    struct dl_spec *before = NULL;
    snprintf(path, sizeof path, "%s/job.json", arguments->run.resume);
    enum dl_rc rc = dl_spec_load(path, &before, warnings, err);
    if (rc != DL_OK || arguments->job == NULL) {
        *out = before;
        return rc == DL_OK ? DL_OK : dl_err_wrap(err, "resume %s", arguments->run.resume);
    }
    rc = dl_spec_load(arguments->job, out, warnings, err);
    if (rc == DL_OK) {
        rc = dl_spec_check_frozen(before, *out, err);
    }
    dl_spec_free(before);
    return rc;
}

int op_cmd_run(int argc, char **argv)
{
    struct arguments arguments;
    int code = parse(argc, argv, &arguments);
    if (code != DL_EXIT_OK || arguments.is_help) {
        fputs(arguments.is_help ? help : "", stdout);
        return code;
    }
    struct dl_err err = {.text = ""};
    static struct dl_spec_warnings warnings;
    static struct op_programs programs;
    struct dl_spec *spec = NULL;
    enum dl_rc rc = load_job(&arguments, &spec, &warnings, &err);
    if (rc == DL_OK) {
        print_warnings(&warnings);
        rc = op_programs_find(arguments.bin_dir, &programs, &err);
    }
    rc = rc == DL_OK ? op_preflight(spec, &err) : rc;
    rc =
        rc == DL_OK && arguments.chaos != NULL ? op_chaos_parse(arguments.chaos, spec, &arguments.run.chaos, &err) : rc;
    rc = rc == DL_OK ? check_results(arguments.run.results, &err) : rc;
    if (rc == DL_OK) {
        arguments.run.spec = spec;
        arguments.run.warnings = &warnings;
        arguments.run.programs = &programs;
        rc = op_supervise(&arguments.run, &code, &err);
    }
    dl_spec_free(spec);
    return rc == DL_OK ? code : op_cli_fail("run", &err);
}

/* --- check --- */

static void print_bytes(const char *what, uint64_t bytes)
{
    printf("%-22s %.1f MiB\n", what, (double)bytes / (1024.0 * 1024.0));
}

static void print_warmup(const struct dl_spec *spec, const struct op_estimate *estimate)
{
    if (estimate->warmup_steps > 0) {
        printf("%-22s the first %llu of these steps, with %llu syncs of all fragments (sync.warmup.steps %lu%s)\n",
               "interval warm-up", (unsigned long long)estimate->warmup_steps,
               (unsigned long long)estimate->warmup_syncs, (unsigned long)dl_warmup_steps(spec),
               spec->sync.warmup.steps == DL_WARMUP_BY_LENGTH ? ", by the run's length" : "");
    } else {
        printf("%-22s none\n", "interval warm-up");
    }
}

static const char *plural(uint32_t count)
{
    return count == 1 ? "" : "s";
}

static void print_learners(const struct dl_spec *spec)
{
    printf("%-22s %u (%u to %u), quorum %u, %u syncer shard%s\n", "learners", spec->learners.replicas,
           spec->learners.min, spec->learners.max, dl_count_resolve(spec->sync.quorum, spec->learners.replicas),
           spec->syncer.shards, plural(spec->syncer.shards));
}

/* A job without data is that of a trainer of one's own, whose tensors are not known here. */
static void print_foreign(const struct dl_spec *spec)
{
    char budget[32];
    op_format_count((double)spec->training.token_budget, budget, sizeof budget);
    printf("%-22s %s\n%-22s %s\n", "job", spec->name, "model",
           "that of a trainer of your own (there are no training.data.paths): its sizes are not known here");
    print_learners(spec);
    printf("%-22s %s tokens; %u fragment%s, every %u step%s\n", "budget", budget, spec->sync.fragments,
           plural(spec->sync.fragments), spec->sync.interval, plural(spec->sync.interval));
}

static void print_summary(const struct dl_spec *spec)
{
    struct op_estimate estimate;
    op_estimate_make(spec, &estimate);
    const struct dl_training_spec *training = &spec->training;
    const struct dl_model_spec *model = &training->model;
    char parameters[32], budget[32];
    op_format_count((double)estimate.parameters, parameters, sizeof parameters);
    op_format_count((double)training->token_budget, budget, sizeof budget);
    printf("%-22s %s\n", "job", spec->name);
    printf("%-22s %s parameters (%llu): vocabulary %u, width %u, %u layer%s, %u head%s, sequences of %u\n", "model",
           parameters, (unsigned long long)estimate.parameters, model->vocab_size, model->width, model->layers,
           plural(model->layers), model->heads, plural(model->heads), model->sequence_length);
    for (uint32_t i = 0; i < training->data.path_count; i++) {
        printf("%-22s %s\n", i == 0 ? "data" : "", training->data.paths[i]);
    }
    print_learners(spec);
    printf("%-22s %llu a learner, %llu over all\n", "tokens a step", (unsigned long long)estimate.tokens_per_step,
           (unsigned long long)estimate.tokens_per_learner_step_all);
    if (training->token_budget > 0) {
        printf("%-22s %s tokens: %llu steps a learner, about %llu rounds (%u fragment%s, every %u step%s)\n", "budget",
               budget, (unsigned long long)estimate.steps_per_learner, (unsigned long long)estimate.rounds,
               spec->sync.fragments, plural(spec->sync.fragments), spec->sync.interval, plural(spec->sync.interval));
        print_warmup(spec, &estimate);
    }
    print_bytes("memory a learner", estimate.learner_bytes);
    print_bytes("memory of the evaluator", estimate.evaluator_bytes);
    print_bytes("memory a syncer", estimate.syncer_bytes);
    print_bytes("memory available here", op_memory_available());
    printf("%-22s %.1f KiB\n", "a push", (double)estimate.push_bytes / 1024.0);
    printf("%-22s %.1f KiB up, %.1f KiB down; divide by a step's seconds for the bandwidth that does\n",
           "a learner's step", (double)estimate.up_bytes / 1024.0, (double)estimate.down_bytes / 1024.0);
}

int op_cmd_check(int argc, char **argv)
{
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        puts("diloco check [--cluster] JOB.yaml: parses a job, says what it needs and what is doubtful about it.\n"
             "--cluster: as a cluster takes it; data, memory and ports of this machine are not looked at.\n"
             "Exit code 0: it can run on this machine (in a cluster); 2: it cannot, and why.");
        return DL_EXIT_OK;
    }
    bool is_for_cluster = argc == 3 && strcmp(argv[1], "--cluster") == 0;
    if (argc != 2 + is_for_cluster || argv[argc - 1][0] == '-') {
        return op_cli_usage("check", "name one manifest");
    }
    struct dl_err err = {.text = ""};
    static struct dl_spec_warnings warnings;
    struct dl_spec *spec = NULL;
    enum dl_rc rc = dl_spec_load(argv[argc - 1], &spec, &warnings, &err);
    if (rc == DL_OK) {
        (spec->training.data.path_count > 0 ? print_summary : print_foreign)(spec);
        print_warnings(&warnings);
        rc = is_for_cluster ? DL_OK : op_preflight(spec, &err);
    }
    dl_spec_free(spec);
    return rc == DL_OK ? DL_EXIT_OK : op_cli_fail("check", &err);
}
