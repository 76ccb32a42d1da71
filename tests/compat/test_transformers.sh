#!/usr/bin/env bash
# Opens an exported model in transformers and compares logits: test_transformers.sh --build DIR.
#
# Uses its own environment below build/venv-compat, made from PyPI when it is missing and kept between runs (5.6 GB, about two
# minutes: PyPI's PyTorch for Linux brings CUDA's libraries). tests/bench uses the same one as its yardstick.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/release
while [ $# -gt 0 ]; do
    case $1 in
        --build) build=$2; shift 2 ;;
        *) echo "usage: $0 [--build DIR]" >&2; exit 2 ;;
    esac
done
venv=build/venv-compat
if ! "$venv/bin/python" -c 'import torch, transformers' 2> /dev/null; then
    echo "making $venv (torch, transformers from PyPI)"
    rm -rf "$venv"
    mkdir -p build
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --no-cache-dir torch transformers numpy
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$build/tools/model_export" "$folder"
# Nothing may be fetched: what the folder holds must be enough.
HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 "$venv/bin/python" tests/compat/test_transformers.py "$folder" \
    --python-path tests/integration/oracle
