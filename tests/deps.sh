#!/usr/bin/env bash
# Installs the Debian packages that the project needs: deps.sh [GROUP...], groups build, demo, test, lint, cluster (default: all).
# Says what each missing one is for. Needs root or sudo only when something is missing.
set -euo pipefail

packages() {
    cat <<'LIST'
build gcc                    compiler
build make                   runs the Makefile
build libc6-dev              C library headers
build pkg-config             finds libraries
build libcurl4-openssl-dev   HTTP client: status of syncers, Kubernetes API
build libyaml-dev            job manifests
build libcjson-dev           JSON: status, manifests, safetensors headers
build libwebsockets-dev      WebSocket and HTTP server of the syncer
build libcap-dev             header that libwebsockets' header asks for
build libopenblas-dev        matrix products of the built-in trainer
build libsqlite3-dev         round commits and event tape
build libssl-dev             TLS, certificates, digests
build zlib1g-dev             gzip and dictzip text
build libxxhash-dev          checksums
demo dict-gcide              40 MB of English text to train on
test libcunit1-dev           unit tests
test g++                     checks that the public header is C++ too
test python3                 integration tests
test python3-numpy           reference for merge kernels
test python3-torch           independent oracle for the trainer
test python3-venv            own environment for make test-compat and bench-deps
test openssl                 certificates for tests of TLS
test iproute2                links of a given speed between namespaces
test util-linux              unshare, for those namespaces
test procps                  process tables in integration tests
cluster etcd-server         state of the test cluster
cluster containerd          runs its containers
cluster runc                starts them
cluster containernetworking-plugins  their network
cluster iptables            their services
cluster conntrack           kube-proxy asks for it
cluster iproute2            bridge and namespaces
cluster procps              sysctl
cluster openssl             certificates
cluster python3             the harness and its tests
cluster python3-venv        Go from PyPI where this machine has none
lint clang-format            formatting gate
lint clang-tidy              static analysis gate
lint cppcheck                static analysis gate
LIST
}

groups=("$@")
[ ${#groups[@]} -gt 0 ] || groups=(build demo test lint cluster)
command -v dpkg-query > /dev/null || {
    echo "deps: this is not Debian; install the equivalents of:" >&2
    packages >&2
    exit 1
}
missing=()
while read -r group package purpose; do
    for wanted in "${groups[@]}"; do
        if [ "$group" = "$wanted" ] && ! dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'install ok installed'; then
            printf 'deps: %-22s %s\n' "$package" "$purpose"
            missing+=("$package")
        fi
    done
done < <(packages)
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo > /dev/null || {
        echo "deps: not root and no sudo; as root run: apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    }
    as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
echo "deps: installed ${#missing[@]} packages"
