#!/usr/bin/env bash
# Train on GPUS GPUs of this machine, or in GPUS processes on its CPU where it has none.
#   bash tools/dist_train.sh CONFIG GPUS [arguments of train.py ...]
# On several machines: NNODES, NODE_RANK, MASTER_ADDR and PORT, the command once on each.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: bash $0 CONFIG GPUS [arguments of train.py ...]" >&2
    exit 2
fi
TOOLS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CONFIG=$1
GPUS=$2
shift 2

exec "${PYTHON:-python}" "$TOOLS/launch.py" "$GPUS" \
    "$TOOLS/train.py" "$CONFIG" --launcher pytorch "$@"
