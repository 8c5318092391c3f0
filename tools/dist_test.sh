#!/usr/bin/env bash
# Test a checkpoint on GPUS GPUs of this machine, or in GPUS processes on its CPU where it has none.
#   bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py ...]
# On several machines: NNODES, NODE_RANK, MASTER_ADDR and PORT, the command once on each.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: bash $0 CONFIG CHECKPOINT GPUS [arguments of test.py ...]" >&2
    exit 2
fi
TOOLS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CONFIG=$1
CHECKPOINT=$2
GPUS=$3
shift 3

exec "${PYTHON:-python}" "$TOOLS/launch.py" "$GPUS" \
    "$TOOLS/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "$@"
