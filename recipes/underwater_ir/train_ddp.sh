#!/usr/bin/env bash
# Trains the underwater student on several GPUs of this machine, or in CPU processes.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
usage: bash train_ddp.sh [GPUS=4] [BATCH=4] [EPOCHS=20] [IMG=256] [-- trainer options]

  bash train_ddp.sh                           # 4 GPUs, 4 pictures on each, 20 epochs, 256 pixels
  bash train_ddp.sh 2 16
  bash train_ddp.sh 2 4 20 64 -- --width 8    # options of underwater_ir.student.train_student after --

Environment: MASTER_PORT (default: 12355, a free one where that is in use), PYTHON, TRAIN_ROOT, VAL_REF_ROOT,
  VAL_NONREF_ROOT, PSEUDO_ROOT, NUM_WORKERS, SAVE_PATH. Paths are relative to the folder of this script.
TEXT
    exit 0
fi

fail() { # message, exit code
    echo "train_ddp.sh: $1" >&2
    exit "${2:-1}"
}

numbers=(4 4 20 256)
for position in 0 1 2 3; do
    [[ $# -gt 0 && $1 != -- ]] || break
    [[ $1 =~ ^[1-9][0-9]*$ ]] || fail "\`$1\` is not a whole number above 0; bash train_ddp.sh --help" 2
    numbers[position]=$1
    shift
done
[[ $# -eq 0 || $1 == -- ]] || fail "unexpected \`$1\`: trainer options stand after --" 2
[[ $# -eq 0 ]] || shift
read -r gpus batch epochs image_size <<<"${numbers[*]}"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
train_root=${TRAIN_ROOT:-Dataset/train}
pseudo_root=${PSEUDO_ROOT:-pseudo-labels/daclip}
save_path=${SAVE_PATH:-experiments/daclip_student_ddp.pt}
port=${MASTER_PORT:-12355}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || fail "MASTER_PORT=$port is not a port" 2
meeting=(--master_addr=127.0.0.1 --master_port="$port") # torchrun itself does not read MASTER_PORT
if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    [[ -z ${MASTER_PORT:-} ]] || fail "MASTER_PORT=$port is in use; unset it or choose another"
    meeting=(--standalone) # at a free port
fi

# --- the machine and the data ---

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=$(command -v python || command -v python3 || echo python)
    [[ ! -x ../../.venv/bin/python ]] || python=../../.venv/bin/python
fi
found=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)') ||
    fail "$python cannot import torch; pip install -r requirements.txt, or set PYTHON"
if ((found == 0)); then
    place="CPU (no CUDA GPU found; gloo instead of NCCL)"
elif ((gpus > found)); then
    fail "$gpus processes but $found visible GPU(s): bash train_ddp.sh $found, or check CUDA_VISIBLE_DEVICES"
else
    place="$gpus of $found GPUs"
fi
[[ -d $train_root/input && -d $train_root/target ]] ||
    fail "$train_root has no folders input and target; python make_data.py makes a data set, TRAIN_ROOT names another"
labels=0
[[ ! -d $pseudo_root/train ]] ||
    labels=$(find "$pseudo_root/train" \( -name '*.pt' -o -name '*_features.npy' \) | wc -l)
((labels > 0)) || fail "no pseudo-labels (.pt or _features.npy) below $pseudo_root/train; python export_pseudo_labels.py"

cat <<TEXT
==================================================================
Underwater student: DDP training
==================================================================
Place:          $place
Batch:          $batch per process, $((gpus * batch)) in total
Epochs:         $epochs
Picture size:   $image_size x $image_size
Training data:  $train_root
Pseudo-labels:  $pseudo_root ($labels for training)
Weights:        $save_path
==================================================================
TEXT

# --- the launch ---

mkdir -p "$(dirname -- "$save_path")"
# torchrun, without its report after a user's error
PYTHONPATH=../..${PYTHONPATH:+:$PYTHONPATH} "$python" -m yolo_seg_ddp.utils.distributed.loopback "${meeting[@]}" --nnodes=1 --nproc_per_node="$gpus" \
    -m underwater_ir.student.train_student \
    --train-root "$train_root" \
    --val-ref-root "${VAL_REF_ROOT:-Dataset/testset(ref)}" \
    --val-nonref-root "${VAL_NONREF_ROOT:-Dataset/testset(non-ref)}" \
    --pseudo-root "$pseudo_root" \
    --epochs "$epochs" \
    --batch-size "$batch" \
    --num-workers "${NUM_WORKERS:-4}" \
    --img-size "$image_size" \
    --save-path "$save_path" \
    --ddp "$@"
echo "Done: $save_path"
