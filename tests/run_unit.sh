#!/usr/bin/env bash
# Runs unit test programs, two at a time: run_unit.sh BUILD PROGRAM...
# Prints a program's own CUnit summary only when it fails; closes with "unit: N passed, N failed".
# TEST_TRIES=2 tries a failed program once more; one that then passes is called FLAKY, with its first output.
set -u
build=$1
shift
export log_folder=$build/log
mkdir -p "$log_folder"
results=$(mktemp -d)
export results
trap 'rm -rf "$results"' EXIT

run_one() {
    local program=$1 name start try asserts
    name=$(basename "$program")
    for ((try = 1; try <= ${TEST_TRIES:-1}; try++)); do
        start=$(date +%s%N)
        if timeout "${UNIT_TIMEOUT_SECONDS:-300}" "$program" > "$log_folder/unit-$name.log" 2>&1; then
            asserts=$(awk '$1 == "asserts" { print $2 }' "$log_folder/unit-$name.log")
            printf '  ok   %-28s %8s asserts %6d ms%s\n' "$name" "$asserts" $((($(date +%s%N) - start) / 1000000)) \
                "$([ "$try" -gt 1 ] && echo '  FLAKY: failed at first, see above')"
            touch "$results/passed-$name"
            return
        fi
        printf '  FAIL %s\n%s\n' "$name" "$(tail -n 60 "$log_folder/unit-$name.log")"
    done
    touch "$results/failed-$name"
}
export -f run_one
[ $# -eq 0 ] || printf '%s\0' "$@" | xargs -0 -P "${UNIT_JOBS:-2}" -I{} bash -c 'run_one "$1"' run_one {}
passed=$(find "$results" -name 'passed-*' | wc -l)
failed=$(find "$results" -name 'failed-*' | wc -l)
printf 'unit: %d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -eq $# ] && [ "$passed" -gt 0 ]
