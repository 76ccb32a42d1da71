/* A unit test program: one file a module, cases registered with CUnit, exit status 0 only when cases ran and all passed.
 *
 *     static void test_x(void) { CU_ASSERT_EQUAL(1, 1); }
 *     UNIT_MAIN("round", {"x", test_x})
 */
#ifndef DL_TESTS_UNIT_H
#define DL_TESTS_UNIT_H

#include <CUnit/Basic.h>
#include <CUnit/CUnit.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Floats as bits: equal zeros of different sign are not equal here, and a NaN equals itself. */
static inline bool unit_same_bits(const void *a, const void *b, size_t size)
{
    return memcmp(a, b, size) == 0;
}

struct unit_case {
    const char *name;
    void (*run)(void);
};

static inline int unit_main(const char *suite_name, const struct unit_case *cases, size_t count)
{
    if (CU_initialize_registry() != CUE_SUCCESS) {
        return 2;
    }
    CU_pSuite suite = CU_add_suite(suite_name, NULL, NULL);
    for (size_t i = 0; suite != NULL && i < count; i++) {
        if (CU_add_test(suite, cases[i].name, cases[i].run) == NULL) {
            fprintf(stderr, "cannot add test %s\n", cases[i].name);
            return 2;
        }
    }
    CU_basic_set_mode(CU_BRM_NORMAL);
    CU_ErrorCode code = CU_basic_run_tests();
    unsigned failed = CU_get_number_of_failures() + CU_get_number_of_suites_failed();
    unsigned asserts = CU_get_number_of_asserts();
    CU_cleanup_registry();
    /* A program that asserted nothing has tested nothing. */
    return code == CUE_SUCCESS && failed == 0 && asserts > 0 ? 0 : 1;
}

#define UNIT_MAIN(suite_name, ...)                                                                                     \
    int main(void)                                                                                                     \
    {                                                                                                                  \
        static const struct unit_case cases[] = {__VA_ARGS__};                                                         \
        return unit_main(suite_name, cases, sizeof cases / sizeof cases[0]);                                           \
    }

#endif
