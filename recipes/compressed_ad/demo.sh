#!/usr/bin/env bash
# The recipe in small: histories, training on two processes, evaluation. The network is too small to find the goals.
# Writes only below outputs/recipes of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
rm -rf ../../outputs/recipes/compressed_ad
PATH=$(cd "$(dirname "$python")" && pwd):$PATH # where accelerate is
"$python" collect.py configs/demo.yaml
accelerate launch --config_file accelerate_config.yaml train.py configs/demo.yaml
"$python" evaluate.py configs/demo.yaml
