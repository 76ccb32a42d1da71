/* gloo: the process tests/bench/gloo_rounds.py, started once, asked for one measurement at a time. For tests/bench alone. */
#ifndef DL_TESTS_BENCH_GLOO_H
#define DL_TESTS_BENCH_GLOO_H

#include <fcntl.h>
#include <poll.h>

#include "tests/bench/syncer_rig.h"

#define GLOO_SECONDS_MAX 60 /* For one answer; its start loads PyTorch nine times. */
#define GLOO_END_SECONDS_MAX 5
/* By its whole path in argv[0], too: that is how Python finds its environment. */
#define GLOO_PYTHON "build/venv-compat/bin/python"
#define GLOO_SCRIPT "tests/bench/gloo_rounds.py"

struct gloo {  /* pid 0: there is none. */
    pid_t pid; /* Of its process group, too. */
    FILE *orders, *answers;
};

/* A line of its answers, in time; false: none came. */
static inline bool gloo_read(struct gloo *gloo, char *line, int size, int seconds)
{
    struct pollfd ready = {.fd = fileno(gloo->answers), .events = POLLIN};
    return poll(&ready, 1, seconds * 1000) == 1 && fgets(line, size, gloo->answers) != NULL;
}

/* It ends with its orders; by force, with all of its workers, where it does not. */
static inline void gloo_stop(struct gloo *gloo)
{
    char line[64];
    if (gloo->pid > 0) {
        fclose(gloo->orders);
        while (gloo_read(gloo, line, sizeof line, GLOO_END_SECONDS_MAX)) {
        }
        kill(-gloo->pid, SIGKILL);
        waitpid(gloo->pid, NULL, 0);
        fclose(gloo->answers);
    }
    gloo->pid = 0;
}

/* Without build/venv-compat (make bench-deps makes it) there is none. */
static inline void gloo_start(struct gloo *gloo, uint32_t processes, uint64_t count)
{
    int orders[2], answers[2];
    char workers[16], elements[32], line[64];
    *gloo = (struct gloo){0};
    if (access(GLOO_PYTHON, X_OK) != 0) {
        printf("Gloo is left out: no build/venv-compat (make bench-deps)\n");
        return;
    }
    /* No syncer that is started later may keep its orders open: their end is its end. */
    if (pipe2(orders, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) {
        rig_fail("bench: pipe");
    }
    snprintf(workers, sizeof workers, "%u", processes);
    snprintf(elements, sizeof elements, "%llu", (unsigned long long)count);
    gloo->pid = fork();
    if (gloo->pid == 0) {
        setpgid(0, 0);
        dup2(orders[0], STDIN_FILENO);
        dup2(answers[1], STDOUT_FILENO);
        execl(GLOO_PYTHON, GLOO_PYTHON, GLOO_SCRIPT, workers, elements, (char *)NULL);
        _exit(127);
    }
    setpgid(gloo->pid, gloo->pid);
    close(orders[0]);
    close(answers[1]);
    gloo->orders = fdopen(orders[1], "w");
    gloo->answers = fdopen(answers[0], "r");
    if (gloo->pid < 0 || gloo->orders == NULL || gloo->answers == NULL) {
        rig_fail("bench: Gloo");
    }
    if (!gloo_read(gloo, line, sizeof line, GLOO_SECONDS_MAX)) {
        printf("Gloo is left out: it did not start (" GLOO_PYTHON " " GLOO_SCRIPT " 8 1000)\n");
        gloo_stop(gloo);
    }
}

/* One of what gloo_rounds.py lists: the seconds that it took; `cpu`: CPU seconds of all processes. */
static inline double gloo_run(struct gloo *gloo, const char *what, double *cpu)
{
    char line[64], *at = line;
    fprintf(gloo->orders, "%s\n", what);
    fflush(gloo->orders);
    if (!gloo_read(gloo, line, sizeof line, GLOO_SECONDS_MAX)) {
        kill(-gloo->pid, SIGKILL);
        rig_fail("bench: Gloo did not answer");
    }
    double seconds = strtod(line, &at);
    *cpu = strtod(at, NULL);
    return seconds;
}

#endif
