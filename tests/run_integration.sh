#!/usr/bin/env bash
# Runs integration tests one after the other: run_integration.sh BUILD TEST...
# A test is a Python or shell program that takes --build DIR, bounds its own waits, and exits 0 only when what it claims held.
# Closes with "integration: N passed, N failed". TEST_TRIES=2 tries a failed test once more; one that then passes is called
# FLAKY, with its first output.
set -u
build=$1
shift
passed=0
failed=0
mkdir -p "$build/log"
run_one() {
    local test=$1 name log start try runner
    name=$(basename "$test" | sed 's/\.[a-z]*$//')
    log="$build/log/integration-$name.log"
    case "$test" in
        *.py) runner=(/usr/bin/python3 "$test") ;;
        *) runner=(bash "$test") ;;
    esac
    for ((try = 1; try <= ${TEST_TRIES:-1}; try++)); do
        start=$(date +%s%N)
        if timeout --kill-after=10 "${INTEGRATION_TIMEOUT_SECONDS:-420}" "${runner[@]}" --build "$build" > "$log" 2>&1 < /dev/null; then
            printf '  ok   %-28s %6d ms  %s%s\n' "$name" $((($(date +%s%N) - start) / 1000000)) "$(tail -n 1 "$log")" \
                "$([ "$try" -gt 1 ] && echo '  FLAKY: failed at first, see above')"
            return 0
        fi
        printf '  FAIL %s (log: %s)\n' "$name" "$log"
        tail -n 80 "$log"
    done
    return 1
}
for test in "$@"; do
    if run_one "$test"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
printf 'integration: %d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
