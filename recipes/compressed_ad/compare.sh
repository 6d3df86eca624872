#!/usr/bin/env bash
# CompressedAD beside AD, which forgets where the other compresses: three seeds of weights and of test goals.
#   bash compare.sh [compare | compare_key_to_door]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-../../.venv/bin/python}
name=${1:-compare}
mkdir -p runs/compare
"$python" collect.py "configs/$name.yaml"
for seed in 0 1 2; do
    for model in "$name" "${name}_ad"; do
        config=runs/compare/$model-$seed.yaml
        printf 'include: %s\nseed: %s\nenv_split_seed: %s\n' "$PWD/configs/$model.yaml" $seed $seed >"$config"
        "$python" train.py "$config"
        "$python" evaluate.py "$config"
    done
done
