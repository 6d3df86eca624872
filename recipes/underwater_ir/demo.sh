#!/usr/bin/env bash
# The recipe in small, under a minute on 2 quiet cores: data, training (a process per GPU, or two on a CPU), evaluation,
# restored pictures.
# Writes only below outputs/recipes/underwater_ir of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
source ../device.sh
out=$(cd ../.. && pwd)/outputs/recipes/underwater_ir
processes=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)") # one per GPU
rm -rf "$out"
mkdir -p "$out"
"$python" make_data.py --output "$out" --num-train 64 --num-test 8 --size 96
echo '{"perc": 0}' >"$out/losses.json" # without VGG's weights, which would be downloaded
export PYTHON=$python OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TRAIN_ROOT=$out/Dataset/train VAL_REF_ROOT="$out/Dataset/testset(ref)" VAL_NONREF_ROOT="$out/Dataset/testset(non-ref)"
export PSEUDO_ROOT=$out/pseudo-labels/daclip SAVE_PATH=$out/experiments/daclip_student_ddp.pt
bash train_ddp.sh "$processes" 2 3 48 -- --width 8 --lr 1e-3 --loss-config "$out/losses.json" --no-recompute
"$python" evaluate.py --model "$SAVE_PATH" --val-ref-root "$VAL_REF_ROOT" --val-nonref-root "$VAL_NONREF_ROOT" \
    --pseudo-root "$PSEUDO_ROOT" --img-size 48 --output "$out/evaluation"
"$python" restore.py --model "$SAVE_PATH" --source "$VAL_NONREF_ROOT" --output "$out/restored"
measure_step "$out/gpu.json" recipes/underwater_ir/underwater_ir.student.train_student --train-root "$TRAIN_ROOT" \
    --val-ref-root none --val-nonref-root none --pseudo-root "$PSEUDO_ROOT" --batch-size 4 --img-size 256 \
    --loss-config "$out/losses.json" --save-path "$out/gpu/student.pt"
