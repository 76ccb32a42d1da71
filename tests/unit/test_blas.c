/* Choice of OpenBLAS kernels. The program restarts itself through the very function that it tests. */
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/env.h"
#include "common/mem.h"
#include "tests/unit/unit.h"
#include "worker/model/blas.h"

static struct wk_blas_report report;

static void test_kernels_compute_right(void)
{
    struct dl_err err;
    double error = -1;
    CU_ASSERT_EQUAL(wk_blas_verify(&error, &err), DL_OK);
    CU_ASSERT(error >= 0 && error < 1e-5);
    CU_ASSERT(wk_blas_measure(2) > 0.1);
}

static void test_levels(void)
{
    CU_ASSERT_EQUAL(wk_blas_core_level("SkylakeX"), 2);
    CU_ASSERT_EQUAL(wk_blas_core_level("COOPERLAKE"), 2);
    CU_ASSERT_EQUAL(wk_blas_core_level("haswell"), 1);
    CU_ASSERT_EQUAL(wk_blas_core_level("Prescott"), 0);
    CU_ASSERT_EQUAL(wk_blas_core_level(""), 0);
}

/* Unless a user chose otherwise, kernels of the processor's own class run after the start, or a warning says why not.
 */
static void test_report_is_consistent(void)
{
    CU_ASSERT(report.core[0] != 0);
    CU_ASSERT(report.gflops > 0.1);
    bool slow = wk_blas_core_level(report.core) < wk_blas_core_level(report.best);
    CU_ASSERT_EQUAL(slow, report.warning[0] != 0 || getenv(WK_BLAS_KEEP_ENV) != NULL);
    CU_ASSERT(!(report.restarted && report.user_set));
}

/* Runs this program as a child that prints its report; returns its exit status. */
static int child(const char *core, const char *guard, char *line, size_t size)
{
    int ends[2];
    if (pipe(ends) != 0) {
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        unsetenv(WK_BLAS_GUARD_ENV);
        unsetenv("OPENBLAS_CORETYPE");
        if (core != NULL) {
            setenv("OPENBLAS_CORETYPE", core, 1);
        }
        if (guard != NULL) {
            setenv(WK_BLAS_GUARD_ENV, guard, 1);
        }
        execl("/proc/self/exe", "blas", "--report", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    DL_AUTO_FILE FILE *out = fdopen(ends[0], "r");
    line[0] = 0;
    CU_ASSERT_PTR_NOT_NULL(fgets(line, (int)size, out));
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_restart_once(void)
{
    char line[256];
    CU_ASSERT_EQUAL(child(NULL, NULL, line, sizeof line), 0);
    /* Arguments survive the restart, and the child that tries kernels prints nothing into our output. */
    CU_ASSERT_EQUAL(strncmp(line, "report ", 7), 0);
    CU_ASSERT(strstr(line, "user_set=0") != NULL);
    CU_ASSERT(strstr(line, "slow=0") != NULL || strstr(line, "warning=1") != NULL);
}

static void test_user_setting_is_left_alone(void)
{
    char line[256];
    CU_ASSERT_EQUAL(child("Prescott", NULL, line, sizeof line), 0);
    CU_ASSERT(strstr(line, "user_set=1") != NULL);
    CU_ASSERT(strstr(line, "restarted=0") != NULL);
    CU_ASSERT(strstr(line, "core=Prescott") != NULL);
    if (wk_blas_core_level(wk_blas_best_core()) > 0) {
        CU_ASSERT(strstr(line, "warning=1") != NULL);
    }
}

static void test_guard_stops_a_second_restart(void)
{
    char line[256];
    CU_ASSERT_EQUAL(child("Prescott", "Prescott", line, sizeof line), 0);
    CU_ASSERT(strstr(line, "core=Prescott") != NULL);
    CU_ASSERT(strstr(line, "restarted=1") != NULL);
}

/* With a cache the next process goes by what the first one found. */
static void test_verdict_is_shared(void)
{
    char line[256], cache[] = "/tmp/diloco-test-cache-XXXXXX", pattern[64], command[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(cache));
    setenv(DL_ENV_CACHE, cache, 1);
    CU_ASSERT_EQUAL(child(NULL, NULL, line, sizeof line), 0);
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/kernels-*[0-9a-f]", cache);
    bool is_slow = strstr(line, "warning=1") != NULL; /* A verdict that warns is found anew by everyone. */
    CU_ASSERT_EQUAL_FATAL(glob(pattern, 0, NULL, &found), is_slow ? GLOB_NOMATCH : 0);
    if (!is_slow) {
        char core[32];
        DL_AUTO_FILE FILE *verdict = fopen(found.gl_pathv[0], "r+");
        CU_ASSERT_EQUAL_FATAL(fscanf(verdict, "%31s", core), 1);
        rewind(verdict);
        fprintf(verdict, "%s 12345.0\n", core);
        fflush(verdict);
        CU_ASSERT_EQUAL(child(NULL, NULL, line, sizeof line), 0);
        CU_ASSERT(strstr(line, "gflops=12345.0") != NULL);
        CU_ASSERT(strstr(line, core) != NULL);
        /* Nor does it override a user's choice. */
        CU_ASSERT_EQUAL(child("Prescott", NULL, line, sizeof line), 0);
        CU_ASSERT(strstr(line, "core=Prescott") != NULL && strstr(line, "gflops=12345.0") == NULL);
    }
    globfree(&found);
    unsetenv(DL_ENV_CACHE);
    snprintf(command, sizeof command, "rm -r '%s'", cache);
    CU_ASSERT_EQUAL(system(command), 0);
}

int main(int argc, char **argv)
{
    struct dl_err err;
    if (wk_blas_init(argc, argv, &report, &err) != DL_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    if (argc == 2 && strcmp(argv[1], "--report") == 0) {
        printf("report core=%s user_set=%d restarted=%d slow=%d warning=%d gflops=%.1f\n", report.core, report.user_set,
               report.restarted, wk_blas_core_level(report.core) < wk_blas_core_level(report.best),
               report.warning[0] != 0, report.gflops);
        return 0;
    }
    static const struct unit_case cases[] = {{"kernels compute right", test_kernels_compute_right},
                                             {"levels", test_levels},
                                             {"report is consistent", test_report_is_consistent},
                                             {"restarts once", test_restart_once},
                                             {"user's setting is left alone", test_user_setting_is_left_alone},
                                             {"guard stops a second restart", test_guard_stops_a_second_restart},
                                             {"verdict is shared", test_verdict_is_shared}};
    return unit_main("blas", cases, DL_COUNT_OF(cases));
}
