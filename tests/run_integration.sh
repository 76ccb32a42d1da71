#!/usr/bin/env bash
# Runs integration tests one after the other: run_integration.sh BUILD TEST...
# A test is a Python or shell program that takes --build DIR, bounds its own waits, and exits 0 only when what it claims held.
# Closes with "integration: N passed, N failed".
set -u
build=$1
shift
passed=0
failed=0
mkdir -p "$build/log"
for test in "$@"; do
    name=$(basename "$test" | sed 's/\.[a-z]*$//')
    log="$build/log/integration-$name.log"
    start=$(date +%s%N)
    case "$test" in
        *.py) runner=(/usr/bin/python3 "$test") ;;
        *) runner=(bash "$test") ;;
    esac
    if timeout --kill-after=10 "${INTEGRATION_TIMEOUT_SECONDS:-420}" "${runner[@]}" --build "$build" > "$log" 2>&1 < /dev/null; then
        passed=$((passed + 1))
        printf '  ok   %-28s %6d ms  %s\n' "$name" $((($(date +%s%N) - start) / 1000000)) "$(tail -n 1 "$log")"
    else
        failed=$((failed + 1))
        printf '  FAIL %s (log: %s)\n' "$name" "$log"
        tail -n 80 "$log"
    fi
done
printf 'integration: %d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
