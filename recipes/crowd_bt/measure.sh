#!/usr/bin/env bash
# Measures what README.md claims of a network: a crowd's reliability is found, the order is learned.
# usage: ./measure.sh [FOLDER [SEED [options of train.py]]]; 12 epochs of 48-pixel pictures in one process
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
output=$(realpath -m "${1:-../../outputs/recipes/crowd_bt_measured}") seed=${2:-0}
shift $(($# < 2 ? $# : 2))
python=${PYTHON:-python}
data=$output/crowd-$seed run=$output/run-$seed

mkdir -p "$output"
[[ -d $data ]] || "$python" make_data.py --output "$data" --size 48 --num-pictures 1000 --comparisons 4000 --seed "$seed"
"$python" train.py --backbone test_resnet --no-pretrained --input-size 48 --epochs 12 --batch-size 16 --num-workers 0 \
    --lr 2e-3 --rotation 0 --image-dir "$data/images" --data-dir "$data" --checkpoint-dir "$run" --seed $((42 + seed)) "$@"
"$python" evaluate.py --checkpoint "$run/best_model.pt" --split all --data-dir "$data/unseen" \
    --image-dir "$data/unseen/images" --output "$output/unseen-$seed.json"
