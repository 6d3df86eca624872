#!/usr/bin/env bash
# The whole pipeline on the built-in sample, in some 8 minutes on 2 cores: sample, labels, their check, training on 2
# processes, evaluation, pictures, a map; then wires in large photographs. Writes only below data/demo, models/demo*, outputs/demo.
set -euo pipefail
cd "$(dirname "$0")"
export PYTHON=${PYTHON:-python}
step() { printf '\n== %s\n' "$*"; }

step "1/9 Making the built-in sample"
"$PYTHON" download_data.py --sample 240 --output data/demo/raw
step "2/9 Parsing labels to YOLO format"
"$PYTHON" parse_labels.py --input data/demo/raw --output data/demo/processed --line-width 14 --long-side 640
step "3/9 Looking for mistakes in the labels"
"$PYTHON" check_data.py --data data/demo/processed/dataset.yaml --output outputs/demo/check
step "4/9 Training on all GPUs, or on 2 CPU processes"
bash train_ddp.sh -- --batch-size 4 --epochs 18 --img-size 320 --model yolov8n-seg.yaml \
    --data data/demo/processed/dataset.yaml --save-dir models/demo
step "5/9 Evaluating best.pt"
"$PYTHON" evaluate_model.py --model models/demo/best.pt --data data/demo/processed/dataset.yaml --output outputs/demo/evaluation
step "6/9 Predicting on the validation photographs"
"$PYTHON" inference.py --model models/demo/best.pt --source data/demo/processed/val/images --output outputs/demo/predictions
step "7/9 Mapping the poles and transformers of a flight that was not used for training"
"$PYTHON" download_data.py --sample 48 --seed 7 --output data/demo/flight
"$PYTHON" inference.py --model models/demo/best.pt --source data/demo/flight --output outputs/demo/map \
    --classes pole transformers --conf 0.4
"$PYTHON" -m yolo_seg_ddp maps --predictions outputs/demo/map --ground-height 10 --ground-sigma 3
step "8/9 Training on windows of photographs of 20 megapixels"
"$PYTHON" download_data.py --sample 12 --sample-size 5472 --seed 1 --output data/demo/large-raw
"$PYTHON" parse_labels.py --input data/demo/large-raw --output data/demo/large --line-width 7 --long-side native \
    --val-fraction 0.3
bash train_ddp.sh -- --batch-size 4 --epochs 16 --img-size 320 --model models/demo/best.pt --windows 16 --window-scale 1 1 \
    --data data/demo/large/dataset.yaml --save-dir models/demo-windows
step "9/9 Evaluating on tiles, wires by their centrelines too"
"$PYTHON" evaluate_model.py --model models/demo-windows/last.pt --data data/demo/large/dataset.yaml \
    --mask-resolution native --amp auto --output outputs/demo/large

cat <<'TEXT'

Open in this order:
  1. outputs/demo/check/check.html        mistakes in the labels
  2. models/demo/results.png              losses and metrics per epoch
  3. outputs/demo/evaluation/report.html  scores, curves, confusions, worst images
  4. outputs/demo/map/assets.html         a map of the poles and transformers, with their best views
Then look at:
  models/demo/train_batch0.jpg            an augmented training batch
  outputs/demo/predictions/               predictions on the validation photographs
  outputs/demo/large/photographs.html     wires in photographs of 20 megapixels; the network has only begun to learn them
TEXT
