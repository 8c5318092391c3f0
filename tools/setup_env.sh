# shellcheck shell=bash
# Sourced by quickstart.sh and run_tests.sh from the repository's root: installs what is missing and
# leaves the environment active. Arguments go to tools/install.py, whose head lists the variables.
#
# An active virtual or conda environment is used as it is. Without one, .venv is made here
# (.venv-onedl for the forks), by $PYTHON or the first Python 3.10 to 3.12 on the PATH.

mmstepnet_fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

mmstepnet_python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

mmstepnet_find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.10 python3 python; do
        if mmstepnet_python_fits "$candidate"; then
            command -v "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || return 1
    done
    return 1
}

mmstepnet_make_venv() {
    local folder=$1 python
    # A folder that was begun and not finished has no working pip, and is made anew.
    if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(mmstepnet_find_python) || mmstepnet_fail \
        "No Python 3.10, 3.11 or 3.12 found${PYTHON:+ at PYTHON=$PYTHON}." \
        "Install one, or name it: PYTHON=/path/to/python3.11 bash $0"
    echo "Making $folder with $python"
    "$python" -m venv --clear "$folder" || mmstepnet_fail \
        "$python cannot make a virtual environment." \
        "On Debian and Ubuntu, install the package python3-venv; or set PYTHON to another Python."
}

mmstepnet_setup() {
    local folder=${VIRTUAL_ENV:-}
    case ${MMSTEPNET_STACK:-upstream} in
        upstream | onedl) ;;
        *) mmstepnet_fail "MMSTEPNET_STACK must be upstream or onedl, got $MMSTEPNET_STACK." ;;
    esac
    if [ -z "$folder" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        folder=${CONDA_PREFIX:-}
    fi
    if [ -z "$folder" ]; then
        folder=$PWD/.venv
        [ "${MMSTEPNET_STACK:-upstream}" = upstream ] || folder=$PWD/.venv-$MMSTEPNET_STACK
        mmstepnet_make_venv "$folder"
    fi
    [ -x "$folder/bin/python" ] || mmstepnet_fail "The active environment $folder has no Python."
    # The scripts beside this one run $PYTHON too, and must get the environment's.
    unset PYTHON
    export VIRTUAL_ENV=$folder PATH=$folder/bin:$PATH
    python tools/install.py "$@" || exit
}

mmstepnet_setup "$@"
