#!/usr/bin/env bash
# The recipe in small: histories, training (a process per GPU, or two on a CPU), evaluation. The network is too small to
# find the goals.
# Writes only below outputs/recipes of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
rm -rf ../../outputs/recipes/compressed_ad
processes=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)") # one per GPU
PATH=$(cd "$(dirname "$python")" && pwd):$PATH # where accelerate is
"$python" collect.py configs/demo.yaml
accelerate launch --config_file accelerate_config.yaml --num_processes "$processes" train.py configs/demo.yaml
"$python" evaluate.py configs/demo.yaml
