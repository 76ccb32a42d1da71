#include "worker/train/args.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

enum kind { TEXT, UNSIGNED, UNSIGNED_64, LEARNER, NUMBER, LEVEL };

#define CONNECTED (WK_LEARN | WK_EVALUATE)
#define ALL (CONNECTED | WK_GENERATE)

struct option_of {
    const char *name;
    enum kind kind;
    unsigned commands;
    unsigned required; /* For these commands. */
    size_t offset;
    double least, most;
    const char *value, *help;
};

#define AT(member) offsetof(struct wk_args, member)

/* Read as the table it is. */
/* clang-format off */
static const struct option_of options[] = {
    {"job", TEXT, CONNECTED, CONNECTED, AT(job), 0, 0, "FILE", "the job's manifest, YAML or JSON"},
    {"endpoints", TEXT, CONNECTED, CONNECTED, AT(endpoints), 0, 0,
     "URL[,URL..]", "ws:// or wss:// host:port of syncer shard 0, 1, .."},
    {"token-file", TEXT, CONNECTED, 0, AT(token_file), 0, 0, "FILE", "file with the job's token"},
    {"learner", LEARNER, WK_LEARN, 0, AT(learner), -1, INT32_MAX,
     "N", "wanted learner id; default: any that is free"},
    {"uid", TEXT, CONNECTED, 0, AT(uid), 0, 0,
     "UID", "name of this incarnation; default: host and process id"},
    {"serve-listen", TEXT, WK_LEARN, 0, AT(serve_listen), 0, 0,
     "ADDRESS", "address:port where joiners may fetch this learner's state (with the token), or off; default: the "
     "address by which it reaches the syncer, a free port"},
    {"serve-address", TEXT, WK_LEARN, 0, AT(serve_address), 0, 0,
     "HOST", "host or host:port that joiners are told instead"},
    {"threads", UNSIGNED, ALL, 0, AT(threads), 1, 256,
     "N", "compute threads; default: spec.training.threads, else the cores that this process may use "
     "(evaluate, generate: 1)"},
    {"export", TEXT, WK_EVALUATE, WK_EVALUATE, AT(export_folder), 0, 0,
     "DIR", "folder for model.safetensors, config.json and evaluations.jsonl"},
    {"tls-ca", TEXT, CONNECTED, 0, AT(tls_ca), 0, 0,
     "FILE", "PEM file of authorities for wss://; default: the system's"},
    {"tls-cert", TEXT, CONNECTED, 0, AT(tls_cert), 0, 0,
     "FILE", "PEM file with a client certificate"},
    {"tls-key", TEXT, CONNECTED, 0, AT(tls_key), 0, 0, "FILE", "PEM file with its key"},
    {"step-seconds", NUMBER, WK_LEARN, 0, AT(step_seconds), 0, 86400,
     "S", "least duration of an inner step, to pace a learner; default: 0"},
    {"grace-seconds", NUMBER, CONNECTED, 0, AT(grace_seconds), 0.1, 3600,
     "S", "after SIGTERM or SIGINT the process has ended within S; default: 10"},
    {"weights", TEXT, WK_GENERATE, WK_GENERATE, AT(weights), 0, 0,
     "DIR", "folder with model.safetensors and config.json"},
    {"prompt", TEXT, WK_GENERATE, 0, AT(prompt), 0, 0,
     "TEXT", "text to go on from (token numbers, unless the vocabulary is bytes); default: a line break"},
    {"tokens", UNSIGNED, WK_GENERATE, 0, AT(tokens), 1, 1e9, "N", "tokens to make; default: 400"},
    {"temperature", NUMBER, WK_GENERATE, 0, AT(temperature), 0, 100,
     "T", "0: always the likeliest token; default: 0.8"},
    {"top-k", UNSIGNED, WK_GENERATE, 0, AT(top_k), 0, 1e9,
     "K", "only among the K likeliest tokens; default: 40; 0: all"},
    {"top-p", NUMBER, WK_GENERATE, 0, AT(top_p), 0, 1,
     "P", "only among the likeliest tokens that have this much probability together; default: 1"},
    {"seed", UNSIGNED_64, WK_GENERATE, 0, AT(seed), 0, 0,
     "S", "the same seed makes the same text; default: 1"},
    {"log-level", LEVEL, ALL, 0, AT(log_level), 0, 0,
     "L", "debug, info, warn or error; default: info"},
};
/* clang-format on */

static const struct {
    const char *name;
    enum wk_command command;
    const char *help;
} commands[] = {
    {"learn", WK_LEARN, "trains as a learner of a job until the job is over"},
    {"evaluate", WK_EVALUATE, "measures the global model's validation loss as it grows, and exports it at the end"},
    {"generate", WK_GENERATE, "makes text with exported weights"},
};

void wk_args_help(FILE *out, enum wk_command command)
{
    fputs(command == 0 ? "usage: diloco-worker learn|evaluate|generate [options]\n" : "", out);
    for (size_t i = 0; i < DL_COUNT_OF(commands); i++) {
        if (command != 0 && command != commands[i].command) {
            continue;
        }
        fprintf(out, "%sdiloco-worker %s: %s\n", command == 0 ? "\n" : "", commands[i].name, commands[i].help);
        for (size_t j = 0; j < DL_COUNT_OF(options); j++) {
            const struct option_of *o = &options[j];
            if ((o->commands & commands[i].command) != 0) {
                fprintf(out, "  --%s %s%s\n        %s\n", o->name, o->value,
                        (o->required & commands[i].command) != 0 ? " (required)" : "", o->help);
            }
        }
    }
    fputs("\n  --help, --version\n\nExit status: 0 finished or stopped as asked, 1 failed (may be tried again), 2 "
          "wrong arguments "
          "or input,\n3 refused by the syncer, 4 timed out.\n",
          out);
}

static enum dl_rc number_error(struct dl_err *err, const struct option_of *o, const char *text)
{
    return dl_err_set(err, DL_EINVAL, "--%s '%s': give a number from %.10g to %.10g (%s)", o->name, text, o->least,
                      o->most, o->help);
}

static enum dl_rc take_number(const struct option_of *o, const char *text, void *at, struct dl_err *err)
{
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || errno != 0 || !isfinite(value) || value < o->least || value > o->most) {
        return number_error(err, o, text);
    }
    if (o->kind == NUMBER) {
        *(double *)at = value;
        return DL_OK;
    }
    if (value != floor(value)) {
        return number_error(err, o, text);
    }
    if (o->kind == LEARNER) {
        *(int32_t *)at = (int32_t)value;
    } else {
        *(uint32_t *)at = (uint32_t)value;
    }
    return DL_OK;
}

static enum dl_rc take(const struct option_of *o, const char *text, struct wk_args *args, struct dl_err *err)
{
    void *at = (char *)args + o->offset;
    switch (o->kind) {
    case TEXT:
        if (text[0] == 0 && at != (void *)&args->prompt) {
            return dl_err_set(err, DL_EINVAL, "--%s is empty: give %s (%s)", o->name, o->value, o->help);
        }
        *(const char **)at = text;
        return DL_OK;
    case LEVEL: return dl_log_level_parse(text, at, err);
    case UNSIGNED_64: {
        char *end;
        errno = 0;
        unsigned long long value = strtoull(text, &end, 10);
        if (end == text || *end != 0 || errno != 0 || text[0] == '-') {
            return dl_err_set(err, DL_EINVAL, "--%s '%s': give a whole number from 0 to 2^64 - 1", o->name, text);
        }
        *(uint64_t *)at = value;
        return DL_OK;
    }
    case UNSIGNED:
    case LEARNER:
    case NUMBER: return take_number(o, text, at, err);
    }
    return DL_OK;
}

static enum dl_rc find_command(const char *name, struct wk_args *args, struct dl_err *err)
{
    for (size_t i = 0; i < DL_COUNT_OF(commands); i++) {
        if (strcmp(name, commands[i].name) == 0) {
            args->command = commands[i].command;
            return DL_OK;
        }
    }
    return dl_err_set(err, DL_EINVAL, "'%s' is no command; use learn, evaluate or generate (see --help)", name);
}

static enum dl_rc check(const struct wk_args *args, const bool given[], struct dl_err *err)
{
    for (size_t i = 0; i < DL_COUNT_OF(options); i++) {
        const struct option_of *o = &options[i];
        if ((o->required & args->command) != 0 && !given[i]) {
            return dl_err_set(err, DL_EINVAL, "--%s %s is missing: %s (see --help)", o->name, o->value, o->help);
        }
        if (given[i] && (o->commands & args->command) == 0) {
            return dl_err_set(err, DL_EINVAL, "--%s does not belong to this command (see --help)", o->name);
        }
    }
    if ((args->tls_cert == NULL) != (args->tls_key == NULL)) {
        return dl_err_set(err, DL_EINVAL, "--tls-cert and --tls-key go together; one of them is missing");
    }
    return DL_OK;
}

enum dl_rc wk_args_parse(int argc, char **argv, struct wk_args *args, struct dl_err *err)
{
    enum { HELP = DL_COUNT_OF(options), VERSION };
    struct option table[DL_COUNT_OF(options) + 3] = {0};
    bool given[DL_COUNT_OF(options)] = {false};
    for (size_t i = 0; i < DL_COUNT_OF(options); i++) {
        table[i] = (struct option){.name = options[i].name, .has_arg = required_argument};
    }
    table[HELP] = (struct option){.name = "help", .has_arg = no_argument};
    table[VERSION] = (struct option){.name = "version", .has_arg = no_argument};
    *args = (struct wk_args){.learner = -1,
                             .log_level = DL_LOG_INFO,
                             .grace_seconds = 10,
                             .tokens = 400,
                             .top_k = 40,
                             .temperature = 0.8,
                             .top_p = 1,
                             .seed = 1,
                             .prompt = "\n"};
    optind = 0; /* Makes getopt start anew. */
    for (;;) {
        int index = -1;
        int at = DL_MAX(optind, 1);
        int code = getopt_long(argc, argv, "-:h", table, &index);
        if (code == -1) {
            break;
        }
        if (code == 'h' || index == HELP) {
            args->help = true;
            return DL_OK;
        }
        if (index == VERSION) {
            args->version = true;
            return DL_OK;
        }
        enum dl_rc rc = DL_OK;
        if (code == 1) {
            rc = args->command != 0
                     ? dl_err_set(err, DL_EINVAL, "'%s' is one argument too many: options start with -- (see --help)",
                                  optarg)
                     : find_command(optarg, args, err);
        } else if (code == '?' || code == ':') {
            rc = dl_err_set(err, DL_EINVAL,
                            code == ':' ? "%s needs a value (see --help)" : "%s is not known (see --help)", argv[at]);
        } else {
            given[index] = true;
            rc = take(&options[index], optarg, args, err);
        }
        if (rc != DL_OK) {
            return rc;
        }
    }
    if (optind < argc) {
        return dl_err_set(err, DL_EINVAL, "'%s' is one argument too many (see --help)", argv[optind]);
    }
    if (args->command == 0) {
        return dl_err_set(err, DL_EINVAL, "no command: use learn, evaluate or generate (see --help)");
    }
    return check(args, given, err);
}
