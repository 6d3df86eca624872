#!/usr/bin/env bash
# The recipe in small: histories, training (a process per GPU, or two on a CPU), evaluation. The network is too small to
# find the goals.
# Writes only below outputs/recipes of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
source ../device.sh
output=../../outputs/recipes/compressed_ad
rm -rf "$output"
processes=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)") # one per GPU
PATH=$(cd "$(dirname "$python")" && pwd):$PATH # where accelerate is
"$python" collect.py configs/demo.yaml
accelerate launch --config_file accelerate_config.yaml --num_processes "$processes" train.py configs/demo.yaml
"$python" evaluate.py configs/demo.yaml
echo "{include: [$PWD/configs/demo.yaml, $PWD/configs/model/ad_compressed_dr.yaml], save_dir: $output/gpu, train_batch_size: 128}" \
    >"$output/gpu.yaml"
measure_step "$output/gpu.json" recipes/compressed_ad/train "$output/gpu.yaml"
