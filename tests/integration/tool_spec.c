/* Prints what is made from the table of job fields: spec reference | spec crd | spec parse FILE. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/mem.h"
#include "common/spec.h"
#include "common/spec_reference.h"
#include "common/spec_schema.h"

static int print_made(void (*make)(struct dl_buf *out))
{
    struct dl_buf buf;
    dl_buf_init(&buf, 1 << 20);
    make(&buf);
    DL_AUTO_FREE char *text = dl_buf_take(&buf);
    return text != NULL && fputs(text, stdout) >= 0 ? DL_EXIT_OK : DL_EXIT_FAILED;
}

static int print_parsed(const char *path)
{
    struct dl_err err;
    struct dl_spec *spec = NULL;
    DL_AUTO_FREE char *json = NULL;
    if (dl_spec_load(path, &spec, NULL, &err) != DL_OK || dl_spec_to_json(spec, &json, &err) != DL_OK) {
        fprintf(stderr, "%s\n", err.text);
        dl_spec_free(spec);
        return DL_EXIT_USAGE;
    }
    dl_spec_free(spec);
    return fputs(json, stdout) >= 0 ? DL_EXIT_OK : DL_EXIT_FAILED;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "reference") == 0) {
        return print_made(dl_spec_reference);
    }
    if (argc == 2 && strcmp(argv[1], "crd") == 0) {
        return print_made(dl_spec_crd_yaml);
    }
    if (argc == 3 && strcmp(argv[1], "parse") == 0) {
        return print_parsed(argv[2]);
    }
    fprintf(stderr, "use: spec reference | spec crd | spec parse FILE\n");
    return DL_EXIT_USAGE;
}
