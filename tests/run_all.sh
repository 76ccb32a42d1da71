#!/usr/bin/env bash
# All of `make test`: release build, unit and integration tests, sanitizers, gates. Closes with "test: N passed, N failed".
set -u
cd "$(dirname "$0")/.." || exit 2
passed=0
failed=0
step() { # step NAME COMMAND...
    local name=$1 start
    shift
    start=$(date +%s)
    echo "== $name"
    if "$@"; then
        passed=$((passed + 1))
        echo "== $name: ok, $(($(date +%s) - start)) s"
    else
        failed=$((failed + 1))
        echo "== $name: FAILED, $(($(date +%s) - start)) s"
    fi
}
run() { make --no-print-directory -j"$(nproc)" "$@"; }

step "build" run all
step "unit tests" run unit
step "integration tests" run integration
step "unit tests, address sanitizer" run SAN=address unit
step "unit tests, undefined sanitizer" run SAN=undefined unit
step "unit tests, thread sanitizer" run SAN=thread unit
step "cluster tests" run test-cluster
step "lint" run lint
step "lint-selftest" run lint-selftest
echo "test: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
