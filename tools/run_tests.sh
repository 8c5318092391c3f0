#!/usr/bin/env bash
# Sets up the environment and runs the tests. Usage:
#   bash tools/run_tests.sh [--all] [pytest arguments]
# --all adds the slow tests (about 20 minutes more on two cores). Of several -m, pytest takes the
# last: `MMSTEPNET_STACK=onedl bash tools/run_tests.sh -m smoke` is the short run on the forks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
selection=(-m 'not slow')
for argument in "$@"; do
    case $argument in
        --all | --slow) selection=() ;;
        *) arguments+=("$argument") ;;
    esac
done

# shellcheck source=tools/setup_env.sh
source tools/setup_env.sh --tests

# OpenMP's barriers spin; beside another process that costs more than a second thread brings.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec python -m pytest ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
