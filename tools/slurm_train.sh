#!/usr/bin/env bash
# Train on a Slurm cluster.
#   [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS="..."] \
#       bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of train.py ...]
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: bash $0 PARTITION JOB_NAME CONFIG WORK_DIR [arguments of train.py ...]" >&2
    exit 2
fi
TOOLS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
WORK_DIR=$4
shift 4

# shellcheck source=tools/slurm_resources.sh
source "$TOOLS/slurm_resources.sh"
exec srun "${SLURM_RESOURCES[@]}" \
    "${PYTHON:-python}" -u "$TOOLS/train.py" "$CONFIG" \
    --work-dir "$WORK_DIR" --launcher slurm "$@"
