#!/usr/bin/env bash
# Measures what README.md claims: a crowd's reliability is found, the order is learned, annotators' reliabilities help.
# usage: ./measure.sh [FOLDER] [SEEDS...]; 12 epochs of 48-pixel pictures for each of seven trainings
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
output=$(realpath -m "${1:-../../outputs/recipes/crowd_bt_measured}")
shift || true
python=${PYTHON:-python}
seeds=("${@:-0}")
[[ $# -gt 0 ]] || seeds=(0 1 2)
small=(--backbone test_resnet --no-pretrained --input-size 48 --epochs 12 --batch-size 8 --lr 5e-3 --rotation 0)

train() { # name, data folder, further options
    PYTHON=$python ./train_distributed.sh 2 "${small[@]}" --image-dir "$2/images" --data-dir "$2" \
        --checkpoint-dir "$output/$1" "${@:3}" >"$output/$1.log"
    "$python" evaluate.py --checkpoint "$output/$1/best_model.pt" --split all --data-dir "$2/unseen" \
        --image-dir "$2/unseen/images" --output "$output/$1.json" >>"$output/$1.log"
    echo "$1: $(grep -h 'Known order' "$output/$1.log" | tail -n 1) | $(grep -h 'Val Acc' "$output/$1.log" | tail -n 1)"
}

mkdir -p "$output"
[[ -d $output/crowd ]] || "$python" make_data.py --output "$output/crowd" --size 48 --num-pictures 1000 --comparisons 4000 --reliability 0.8
train global "$output/crowd" --eta-lr 0.03
for seed in "${seeds[@]}"; do # a third of the annotators guess; few comparisons, so that their answers matter
    data=$output/annotators$seed
    [[ -d $data ]] || "$python" make_data.py --output "$data" --size 48 --num-pictures 1000 --per-annotator 125 --seed "$seed"
    for loss in crowd-bt bradley-terry; do
        train "$loss-$seed" "$data" --prepared-data-dir "$data/prepared" --seed "$seed" --loss "$loss"
    done
done
