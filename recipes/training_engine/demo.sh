#!/usr/bin/env bash
# The recipe in small: scikit-learn's digits on two processes. Writes only below outputs/recipes of the project.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
output=../../outputs/recipes/training_engine
rm -rf "$output"
"${PYTHON:-../../.venv/bin/python}" distributed_training_example.py --distributed --dataset digits --epochs 8 --batch-size 32 \
    --save-dir "$output"
