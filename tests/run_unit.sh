#!/usr/bin/env bash
# Runs unit test programs one after the other: run_unit.sh BUILD PROGRAM...
# Prints each program's own CUnit summary only when it fails; closes with "unit: N passed, N failed".
set -u
build=$1
shift
passed=0
failed=0
mkdir -p "$build/log"
for program in "$@"; do
    name=$(basename "$program")
    start=$(date +%s%N)
    if timeout "${UNIT_TIMEOUT_SECONDS:-300}" "$program" > "$build/log/unit-$name.log" 2>&1; then
        passed=$((passed + 1))
        asserts=$(awk '$1 == "asserts" { print $2 }' "$build/log/unit-$name.log")
        printf '  ok   %-28s %8s asserts %6d ms\n' "$name" "$asserts" $((($(date +%s%N) - start) / 1000000))
    else
        failed=$((failed + 1))
        printf '  FAIL %s\n' "$name"
        tail -n 60 "$build/log/unit-$name.log"
    fi
done
printf 'unit: %d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
