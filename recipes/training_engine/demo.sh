#!/usr/bin/env bash
# The recipe in small: scikit-learn's digits on two processes. Writes only below outputs/recipes of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
source ../device.sh
output=../../outputs/recipes/training_engine
rm -rf "$output"
"$python" distributed_training_example.py --distributed --dataset digits --epochs 8 --batch-size 32 \
    --save-dir "$output"
measure_step "$output/gpu.json" recipes/training_engine/distributed_training_example --dataset digits --batch-size 128 \
    --save-dir "$output/gpu"
