#!/usr/bin/env bash
# The whole recipe on small pictures: data, training (a process per GPU, or two on a CPU), ranking, unseen photographs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=${PYTHON:-python}
[[ $python != */* || $python == /* ]] || python=$PWD/../../$python # the Makefile's is relative to the project
source ../device.sh
output=$(cd ../.. && pwd)/outputs/recipes/crowd_bt
rm -rf "$output"
mkdir -p "$output"
data=$output/data run=$output/run
processes=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)") # one per GPU

"$python" make_data.py --output "$data" --size 48 --comparisons 1500
PYTHON=$python ./train_distributed.sh "$processes" --backbone test_resnet --no-pretrained --input-size 48 --epochs 4 --batch-size 8 \
    --lr 5e-3 --rotation 0 --data-dir "$data" --image-dir "$data/images" --checkpoint-dir "$run"
"$python" infer.py --checkpoint "$run/best_model.pt" --image-dir "$data/unseen/images" --output "$output/ranking.json"
"$python" evaluate.py --checkpoint "$run/best_model.pt" --split all --data-dir "$data/unseen" \
    --image-dir "$data/unseen/images" --output "$output/unseen.json"
measure_step "$output/gpu.json" recipes/crowd_bt/train --backbone efficientnet_b5 --no-pretrained --input-size 512 \
    --batch-size 8 --data-dir "$data" --image-dir "$data/images" --checkpoint-dir "$output/gpu"
