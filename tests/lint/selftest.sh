#!/usr/bin/env bash
# Plants one fault for each gate in a copy of the tree and expects the gate to turn red, and to be green without it.
set -u
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
passed=0
failed=0

expect() { # expect GREEN|RED WHAT COMMAND...
    local wanted=$1 what=$2 got
    shift 2
    if "$@" > "$copy/.log" 2>&1; then got=GREEN; else got=RED; fi
    if [ "$got" = "$wanted" ]; then
        passed=$((passed + 1))
        echo "  ok   $what: $got"
    else
        failed=$((failed + 1))
        echo "  FAIL $what: expected $wanted, got $got"
        tail -n 20 "$copy/.log"
    fi
}
gate() { # gate NAME [FILE]: in the copy
    LINT_ROOT=$copy LINT_FILES=${2:-} "$here/lint.sh" "$1"
}

cd "$repository" || exit 2
git ls-files -z --cached --others --exclude-standard README.md common syncer worker operator sim tests docs crds helm images Makefile .ci \
    .clang-format |
    tar --null --files-from=- --ignore-failed-read -c 2> /dev/null | tar -x -C "$copy"
file=common/planted.c
good='#include "common/planted.h"

int dl_planted(int x)
{
    return x + 1;
}'
plant() { printf '%s\n' "$1" > "$copy/$file"; }
printf '#ifndef DL_PLANTED_H\n#define DL_PLANTED_H\nint dl_planted(int x);\n#endif\n' > "$copy/common/planted.h"

for name in format cppcheck tidy; do
    plant "$good"
    expect GREEN "$name without a fault" gate "$name" "$file"
done
plant 'int   dl_planted( int x ){return x;}'
expect RED "format: misplaced spaces" gate format "$file"
plant 'int dl_planted(int x);
int dl_planted(int x)
{
    int values[4] = {0};
    return values[4] + x;
}'
expect RED "cppcheck: index out of bounds" gate cppcheck "$file"
plant 'int dl_planted(int x);
int dl_planted(int x)
{
    int *p = 0;
    if (x > 3) {
        return *p;
    }
    return sizeof(p) / sizeof(*p);
}'
expect RED "tidy: null dereference" gate tidy "$file"
plant "$good"
expect GREEN "layers without a fault" gate layers
plant '#include "syncer/core/core.h"'
expect RED "layers: common includes syncer" gate layers
plant "$good"
expect GREEN "banned without a fault" gate banned
plant '#include <string.h>
void dl_planted(char *to, const char *from);
void dl_planted(char *to, const char *from)
{
    strcpy(to, from);
}'
expect RED "banned: strcpy" gate banned
plant 'unsigned dl_planted(struct dl_rng *rng);
unsigned dl_planted(struct dl_rng *rng)
{
    return DL_MAX(1u, (unsigned)dl_rng_below(rng, 3));
}'
expect RED "banned: a draw that is drawn twice" gate banned
rm "$copy/$file"
expect GREEN "headers without a fault" gate headers common/planted.h
printf 'size_t dl_planted(uint32_t x);\n' > "$copy/common/planted.h"
expect RED "headers: types that nobody declared" gate headers common/planted.h
rm "$copy/common/planted.h"
expect GREEN "shell without a fault" gate shell
printf 'if then fi\n' > "$copy/tests/planted.sh"
expect RED "shell: does not parse" gate shell
rm "$copy/tests/planted.sh"
expect GREEN "documents without a fault" gate documents
for fault in 'See [x](nowhere.md).' 'See [x](#nowhere).' 'See `syncer/nowhere.c`.' 'Type `make nowhere`.' 'Type `diloco run --nowhere`.' \
    'Set DILOCO_NOWHERE.' 'Watch diloco_nowhere_total.'; do
    printf '# Planted\n\n%s\n' "$fault" > "$copy/docs/planted.md"
    expect RED "documents: $fault" gate documents
done
rm "$copy/docs/planted.md"
mkdir "$copy/empty"
expect RED "layers: looked at nothing" "$here/layers.py" "$copy/empty"
expect RED "banned: looked at nothing" "$here/banned.py" "$copy/empty"
expect RED "documents: looked at nothing" "$here/documents.py" "$copy/empty"

sanitized() { # sanitized NAME CODE
    printf '%s\n' "$2" > "$copy/planted-$1.c"
    gcc -g -O1 -pthread -fsanitize="$1" -fno-sanitize-recover=all -o "$copy/planted-$1" "$copy/planted-$1.c" || return 0
    "$copy/planted-$1"
}
clean='#include <stdlib.h>
int main(int argc, char **argv) { (void)argv; int *p = malloc(4); *p = argc; int x = *p; free(p); return x - argc; }'
for name in address undefined thread; do
    expect GREEN "$name sanitizer without a fault" sanitized "$name" "$clean"
done
expect RED "address sanitizer: use after free" sanitized address '#include <stdlib.h>
int main(int argc, char **argv) { (void)argv; int *p = malloc(4); *p = argc; free(p); return *(volatile int *)p > 100; }'
expect RED "undefined sanitizer: shift too far" sanitized undefined \
    'int main(int argc, char **argv) { (void)argv; return (1 << (argc + 40)) == 77; }'
expect RED "thread sanitizer: data race" sanitized thread '#include <pthread.h>
static int x;
static void *run(void *p) { for (int i = 0; i < 100000; i++) { x++; } return p; }
int main(void) { pthread_t t; pthread_create(&t, 0, run, 0); run(0); pthread_join(t, 0); return 0; }'

# A unit test program that asserts nothing, or fails, makes the runner fail.
printf '#!/bin/sh\nexit 1\n' > "$copy/failing"
printf '#!/bin/sh\nexit 0\n' > "$copy/passing"
chmod +x "$copy/failing" "$copy/passing"
expect GREEN "unit runner: all pass" tests/run_unit.sh "$copy" "$copy/passing"
expect RED "unit runner: one fails" tests/run_unit.sh "$copy" "$copy/passing" "$copy/failing"
expect RED "unit runner: nothing ran" tests/run_unit.sh "$copy"

echo "lint-selftest: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
