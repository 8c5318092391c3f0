#!/usr/bin/env bash
# Test a checkpoint on a Slurm cluster.
#   [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS="..."] \
#       bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py ...]
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: bash $0 PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py ...]" >&2
    exit 2
fi
TOOLS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
CHECKPOINT=$4
shift 4

# shellcheck source=tools/slurm_resources.sh
source "$TOOLS/slurm_resources.sh"
exec srun "${SLURM_RESOURCES[@]}" \
    "${PYTHON:-python}" -u "$TOOLS/test.py" "$CONFIG" "$CHECKPOINT" --launcher slurm "$@"
