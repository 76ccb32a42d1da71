/* diloco: the command that a person types. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/mem.h"
#include "common/version.h"
#include "operator/cli/cli.h"

bool op_cli_is_kubectl;

static const char kubectl_help[] =
    "kubectl diloco: DecoupledDiLoCoJobs of a cluster (kubectl get ddj)\n"
    "\n"
    "  kubectl diloco status JOB [-n NAMESPACE] [--json]   where a job stands, by its syncers\n"
    "  kubectl diloco top JOB [-n NAMESPACE]               the same, live\n"
    "  kubectl diloco check --cluster JOB.yaml             what a job needs, what is doubtful about it\n"
    "\n"
    "Also --context NAME, --kubeconfig FILE. All else is kubectl's: get, describe, scale, patch, delete ddj/JOB.\n"
    "Runs on this machine: `diloco help`.\n";

static const char help[] =
    "diloco: Decoupled DiLoCo training jobs on this machine\n"
    "\n"
    "  diloco run JOB.yaml [options]         start syncers, learners and an evaluator; show progress; write a report\n"
    "  diloco run --resume RUN [JOB.yaml]    go on with a run where it was\n"
    "  diloco check [--cluster] JOB.yaml     parse a job, say what it needs and what is doubtful about it\n"
    "  diloco status [RUN|URL] [--json]      where a run stands; ddj/JOB -n NAMESPACE: a job in a cluster\n"
    "  diloco top [RUN|URL]                  the same, live\n"
    "  diloco scale RUN N                    N learners from now on\n"
    "  diloco kill RUN learner ID [SIGNAL]   a signal to a learner (or: syncer SHARD); default KILL\n"
    "  diloco stop RUN                       end a run: merge once more, export the weights\n"
    "  diloco generate [RUN] [options]       text from the weights of a run\n"
    "  diloco checkpoint [RUN] [options]     a consistent state over all shards: make, list, remove\n"
    "  diloco export [RUN] --out DIR         the global parameters as safetensors, while the run goes on\n"
    "  diloco replay [RUN] [options]         execute a run again, to the bit; say where it differs\n"
    "  diloco version\n"
    "\n"
    "RUN is a run folder; left out where that is possible, it is the newest below ./runs. `diloco COMMAND --help` says "
    "more.\n"
    "Exit codes: 0 finished or stopped as asked, 1 failed, 2 wrong arguments or input, 3 refused, 4 timed out.\n";

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", op_cmd_run},       {"check", op_cmd_check},
    {"status", op_cmd_status}, {"top", op_cmd_top},
    {"scale", op_cmd_scale},   {"kill", op_cmd_kill},
    {"stop", op_cmd_stop},     {"generate", op_cmd_generate},
    {"replay", op_cmd_replay}, {"checkpoint", op_cmd_checkpoint},
    {"export", op_cmd_export},
};

int main(int argc, char **argv)
{
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    op_cli_is_kubectl = argc > 0 && strcmp(slash != NULL ? slash + 1 : argv[0], "kubectl-diloco") == 0;
    const char *usage = op_cli_is_kubectl ? kubectl_help : help;
    if (argc < 2) {
        fputs(usage, stderr);
        return DL_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        fputs(usage, stdout);
        return DL_EXIT_OK;
    }
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        printf("diloco " DL_VERSION "\n");
        return DL_EXIT_OK;
    }
    for (size_t i = 0; i < DL_COUNT_OF(commands); i++) {
        if (strcmp(name, commands[i].name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    fprintf(stderr, "diloco: there is no command '%s'; see `diloco help`\n", name);
    return DL_EXIT_USAGE;
}
