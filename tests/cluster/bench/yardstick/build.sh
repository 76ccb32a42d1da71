#!/usr/bin/env bash
# Builds the yardstick: build.sh FILE. With the Go and the module cache of the test cluster's programs.
set -euo pipefail
out=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
cache=$(dirname "$("$here/../../build_tools.sh" --where)")
go=go
command -v go > /dev/null || go=$cache/go-venv/bin/go
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS='-mod=mod -trimpath' GOWORK=off
export GOMODCACHE=$cache/go-mod GOCACHE=$cache/go-build GOPATH=$cache/go-path
cp "$here/main.go" "$work/"
cd "$work"
printf 'module diloco.dev/tests/cluster/yardstick\n\ngo 1.26\n' > go.mod
for module in api apimachinery client-go; do "$go" mod edit -require "k8s.io/$module@v0.36.1"; done
nice -n 10 "$go" build -p 2 -ldflags "-s -w" -o "$out" .
