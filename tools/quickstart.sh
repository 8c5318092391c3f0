#!/usr/bin/env bash
# From a fresh checkout to a trained detector: installs everything, composes a detection set from
# scikit-learn's handwritten digits, trains a Faster R-CNN with StepNet and a plain one on it, shows
# AP, pictures of detections and the stiffness of both networks.
#
#   bash tools/quickstart.sh
#
# Under 30 minutes on two CPU cores, ten of them for compiling mmcv. It can be stopped and started
# again: finished steps are skipped, and training goes on from its last epoch. To begin anew, remove
# work_dirs/quickstart. The variables that choose Python, torch or the stack are in docs/install.md.
set -euo pipefail
if [ $# -gt 0 ]; then
    echo "usage: bash $0 (no arguments; docs/install.md lists the variables that choose Python," \
        "torch and the stack)" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=work_dirs/quickstart
BATCH=8
STEPS=8
step=0

begin() {
    step=$((step + 1))
    printf '\n=== [%d/%d, %d min so far] %s\n' "$step" "$STEPS" "$((SECONDS / 60))" "$1"
}


trap 'echo "Stopped. bash tools/quickstart.sh goes on from there." >&2; exit 130' INT

# In a log, a progress bar is a line a minute.
[ -t 2 ] || export TQDM_MININTERVAL=${TQDM_MININTERVAL:-60}

begin 'Installing (about 15 min the first time, most of it for compiling mmcv)'
# shellcheck source=tools/setup_env.sh
source tools/setup_env.sh

# A GPU that mmcv has no ops for is left alone; without any GPU two processes share the CPU.
read -r processes usable < <(python - <<'PY'
import torch
from mmcv.ops import get_compiling_cuda_version

usable = get_compiling_cuda_version() != 'not available'
print(min(2, torch.cuda.device_count() if usable else 0) or 2, int(usable))
PY
)
[ "$usable" = 1 ] || export CUDA_VISIBLE_DEVICES=

train() {
    local config=$1 folder=$2
    if [ -f "$folder/trained" ]; then
        echo "$folder is trained already"
        return
    fi
    bash tools/dist_train.sh "$config" "$processes" --work-dir "$folder" --resume \
        --cfg-options train_dataloader.batch_size=$((BATCH / processes))
    touch "$folder/trained"
}

evaluate() {
    local config=$1 folder=$2 best
    shift 2
    best=$(best_checkpoint "$folder")
    if [ "$folder/metrics.json" -nt "$best" ]; then
        echo "$folder is evaluated already"
        return
    fi
    python tools/test.py "$config" "$best" --work-dir "$folder" \
        --out-item metrics --out "$folder/metrics.json" "$@"
}

best_checkpoint() {
    local found=("$1"/best_coco_bbox_mAP_epoch_*.pth)
    printf '%s' "${found[-1]}"
}

stiffness() {
    local config=$1 folder=$2 best
    best=$(best_checkpoint "$folder")
    if [ "$folder/stiffness/${folder##*/}.json" -nt "$best" ]; then
        echo "$folder is measured already"
        return
    fi
    python tools/analysis_tools/stiffness.py "$config" "$best" --work-dir "$folder" \
        --include-first --out "$folder/stiffness/${folder##*/}.json"
}

STEPNET=configs/digits/faster_rcnn_r18_stepnet_digits.py
PLAIN=configs/digits/faster_rcnn_r18_org_digits.py

begin 'Composing the digits (seconds)'
python tools/dataset_converters/digits2coco.py

begin 'Training with StepNet (about 5 min)'
train "$STEPNET" "$OUT/stepnet"

begin 'Testing its best checkpoint, drawing true and predicted boxes (about 1 min)'
evaluate "$STEPNET" "$OUT/stepnet" --show-dir "$OUT/pictures"

begin 'Training the plain network (about 5 min)'
train "$PLAIN" "$OUT/plain"

begin 'Testing its best checkpoint (seconds)'
evaluate "$PLAIN" "$OUT/plain"

begin 'Measuring the stiffness of both (about 1 min)'
stiffness "$STEPNET" "$OUT/stepnet"
stiffness "$PLAIN" "$OUT/plain"

begin 'Result'
python tools/analysis_tools/compare_stiffness.py \
    "$OUT/stepnet/stiffness/stepnet.json" "$OUT/plain/stiffness/plain.json" \
    --out-dir "$OUT/comparison"
python - "$OUT" <<'PY'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
print()
for name, title in (('stepnet', 'StepNet'), ('plain', 'plain')):
    metrics = json.loads((out / name / 'metrics.json').read_text())
    print(f'{title:8s} bbox mAP {metrics["coco/bbox_mAP"]:.3f}, AP50 {metrics["coco/bbox_mAP_50"]:.3f}')
print(f'Pictures, true boxes left and predicted ones right: {out / "pictures"}')
print(f'Stiffness side by side: {out / "comparison" / "comparison.html"}')
PY
printf 'Done in %d min.\n' "$((SECONDS / 60))"
