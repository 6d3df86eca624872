#!/usr/bin/env bash
# Measures what README.md claims of a network: a crowd's reliability is found, the order is learned. See also measure.py.
# usage: ./measure.sh [FOLDER]; 12 epochs of 48-pixel pictures
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
output=$(realpath -m "${1:-../../outputs/recipes/crowd_bt_measured}")
python=${PYTHON:-python}
data=$output/crowd run=$output/global

mkdir -p "$output"
[[ -d $data ]] || "$python" make_data.py --output "$data" --size 48 --num-pictures 1000 --comparisons 4000
PYTHON=$python ./train_distributed.sh 2 --backbone test_resnet --no-pretrained --input-size 48 --epochs 12 --batch-size 8 \
    --lr 5e-3 --rotation 0 --image-dir "$data/images" --data-dir "$data" --checkpoint-dir "$run"
"$python" evaluate.py --checkpoint "$run/best_model.pt" --split all --data-dir "$data/unseen" \
    --image-dir "$data/unseen/images" --output "$output/unseen.json"
