#!/usr/bin/env bash
# Codecs, merges and outer optimisers against NumPy and PyTorch.
exec /usr/bin/python3 "$(dirname "$0")/oracle/merge_oracle.py" "$@"
