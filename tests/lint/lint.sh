#!/usr/bin/env bash
# The gates of `make lint`: lint.sh [GATE...] (default: all). Environment: LINT_ROOT (default: the repository), LINT_FILES (only
# these files, for the gates that look at files).
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=${LINT_ROOT:-$(cd "$here/../.." && pwd)}
cd "$root" || exit 2

INCLUDES=(-I. -D_GNU_SOURCE)
sources() {
    if [ -n "${LINT_FILES:-}" ]; then
        tr ' ' '\n' <<< "$LINT_FILES"
    else
        find common syncer worker operator sim tests docs/examples -name '*.c' 2> /dev/null | LC_ALL=C sort
    fi
}
headers() {
    if [ -n "${LINT_FILES:-}" ]; then
        tr ' ' '\n' <<< "$LINT_FILES"
    else
        find common syncer worker operator sim tests -name '*.h' | LC_ALL=C sort
    fi
}

gate_format() {
    { sources; headers; } | LC_ALL=C sort -u | xargs clang-format --dry-run -Werror
}
gate_layers() { python3 "$here/layers.py" "$root"; }
gate_banned() { python3 "$here/banned.py" "$root"; }
gate_documents() { python3 "$here/documents.py" "$root"; }
gate_headers() { # Each header compiles alone; the public one also as C++.
    local failed=0 count=0 header
    while read -r header; do
        count=$((count + 1))
        gcc -std=gnu11 -Wall -Wextra -Werror "${INCLUDES[@]}" -fsyntax-only -x c - <<< "#include \"$header\"" || failed=1
    done < <(headers)
    if [ -z "${LINT_FILES:-}" ]; then
        g++ -std=c++17 -Wall -Wextra -Werror -I. -fsyntax-only -x c++ - <<< '#include "worker/link/diloco.h"' || failed=1
    fi
    [ "$count" -gt 0 ] && [ "$failed" -eq 0 ]
}
gate_cppcheck() {
    # shellcheck disable=SC2046
    cppcheck --quiet --std=c11 --enable=warning,portability,performance --inline-suppr --error-exitcode=1 -j 2 \
        --suppress=missingIncludeSystem --suppress=normalCheckLevelMaxBranches --suppressions-list="$here/cppcheck.txt" \
        "${INCLUDES[@]}" $(sources)
}
run_tidy() { # The files of standard input; more arguments go to clang-tidy. `--`: flags stand here, there is no database to look for.
    xargs -r -P 2 -I FILE clang-tidy --quiet --warnings-as-errors='*' --config-file="$here/clang-tidy.yaml" "$@" FILE -- \
        -std=gnu11 -I. -D_GNU_SOURCE
}
gate_tidy() {
    local status=0
    sources | grep -v '^tests/' | run_tidy || status=1
    # The analyser does not know that CUnit's fatal assertions end a test, nor what was zeroed before it is compared.
    sources | grep '^tests/' |
        run_tidy --checks='-clang-analyzer-core.NullDereference,-clang-analyzer-core.NonNullParamChecker,-bugprone-suspicious-memory-comparison' || status=1
    return $status
}
gate_shell() { # Scripts parse.
    local script failed=0 count=0
    for script in .ci/run tests/*.sh tests/*/*.sh; do
        [ -e "$script" ] || continue
        count=$((count + 1))
        bash -n "$script" || failed=1
    done
    [ "$count" -gt 0 ] && [ "$failed" -eq 0 ]
}

gates=("$@")
[ ${#gates[@]} -gt 0 ] || gates=(format layers banned documents headers shell cppcheck tidy)
status=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for gate in "${gates[@]}"; do
    if "gate_$gate" > "$log" 2>&1; then
        echo "  ok   $gate"
    else
        echo "  FAIL $gate"
        tail -n 60 "$log"
        status=1
    fi
done
exit $status
