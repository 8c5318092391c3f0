# What slurm_train.sh and slurm_test.sh ask srun for; sourced, not run.
# Sets SLURM_RESOURCES from PARTITION, JOB_NAME and the environment.
# shellcheck shell=bash disable=SC2034  # the scripts that source it use SLURM_RESOURCES
GPUS=${GPUS:-8}
CPUS_PER_TASK=${CPUS_PER_TASK:-5}
for name in GPUS CPUS_PER_TASK GPUS_PER_NODE; do
    value=${!name:-1}
    if ! [[ $value =~ ^[1-9][0-9]*$ ]]; then
        echo "error: $name must be a whole number of at least 1, got '$value'" >&2
        exit 2
    fi
done
# Fewer GPUS than a node has must not make Slurm wait for a whole node.
GPUS_PER_NODE=${GPUS_PER_NODE:-$((GPUS < 8 ? GPUS : 8))}
if ((GPUS % GPUS_PER_NODE != 0)); then
    echo "error: GPUS ($GPUS) must be a multiple of GPUS_PER_NODE ($GPUS_PER_NODE)" >&2
    exit 2
fi
if ! command -v srun >/dev/null; then
    echo "error: there is no srun here: these scripts run on a Slurm cluster's login node" >&2
    exit 2
fi
# SRUN_ARGS is a string of several options, split at its spaces.
read -r -d '' -a EXTRA <<<"${SRUN_ARGS:-}" || true
SLURM_RESOURCES=(
    --partition "$PARTITION"
    --job-name "$JOB_NAME"
    --gres "gpu:$GPUS_PER_NODE"
    --nodes "$((GPUS / GPUS_PER_NODE))"
    --ntasks "$GPUS"
    --ntasks-per-node "$GPUS_PER_NODE"
    --cpus-per-task "$CPUS_PER_TASK"
    --kill-on-bad-exit=1
    ${EXTRA[@]+"${EXTRA[@]}"}
)
