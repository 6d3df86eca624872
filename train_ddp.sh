#!/usr/bin/env bash
# Starts distributed training with torchrun: chooses the number of processes and passes on everything else.
set -euo pipefail

usage() {
    cat <<TEXT
usage: bash train_ddp.sh [N] [BATCH] [EPOCHS] [IMG_SIZE] [launcher options] [-- trainer options]

  N         processes on this machine (default: one per visible GPU; 2 without GPUs)
  BATCH     images per process and step, passed on as --batch-size
  EPOCHS    passed on as --epochs
  IMG_SIZE  pixels, passed on as --img-size

  bash train_ddp.sh 4                                    # four GPUs
  bash train_ddp.sh 4 16 100 640                         # batch 16 on each, 100 epochs, 640 pixels
  bash train_ddp.sh 2 --max-restarts 5 -- --lr 0.02      # torchrun's options before --, the trainer's after it
  NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash train_ddp.sh 8      # on the first of two machines

Launcher options (torchrun's own, spelt with - or _): --max-restarts --monitor-interval --log-dir --redirects --tee
  --local-ranks-filter --local-addr --rdzv-id --rdzv-conf --shutdown-timeout --master-port

Relative paths in trainer options are relative to the folder of this script, where training runs.

Environment
  CUDA_VISIBLE_DEVICES  which GPUs to use
  MASTER_PORT           port of the launcher's rendezvous (default: a free one; 29500 with several machines)
  NNODES                machines: 2, or 1:4 for an elastic job (default 1)
  MASTER_ADDR           address of the first machine; needed with several machines
  NODE_RANK             this machine's number from 0. With a fixed NNODES it sets which machine holds rank 0 and
                        writes the results. Without it, or when elastic (such as 2:2), the machines agree on rank 0
                        and notice at once when one of them restarts or is lost
  PET_NNODES, ...       as Kubeflow sets them: used where the variables above are unset
  OMP_NUM_THREADS       threads per process (default: the cores that the loader workers leave)
  PYTHON                interpreter (default: .venv/bin/python, else python)
  TRAIN_SCRIPT          another trainer to start (default: train_yolo_ddp.py); its data is checked only with --data
  DRY_RUN=1             check everything, print the command and exit

Ctrl-C, SIGTERM or a closed terminal stops every process; the trainer saves a checkpoint first.
TEXT
}

fail() { # message, exit code
    echo "train_ddp.sh: $1" >&2
    exit "${2:-1}"
}

absolute() { # makes a path with a folder absolute, so it stays valid after cd; leaves a bare command name unchanged
    case $1 in
        /*) echo "$1" ;;
        */*) echo "$PWD/$1" ;;
        *) if [[ -e $1 ]]; then echo "$PWD/$1"; else echo "$1"; fi ;;
    esac
}

for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit 0 ;;
        --) break ;;
    esac
done

# --- an interpreter with its packages, and a trainer; yolo_seg_ddp/training/launch.py reads the rest and starts torchrun ---

python=${PYTHON:+$(absolute "$PYTHON")}
trainer=${TRAIN_SCRIPT:+$(absolute "$TRAIN_SCRIPT")}
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
if [[ -z $python ]]; then
    python=$(command -v python || command -v python3 || echo python)
    [[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
fi
command -v "$python" >/dev/null || fail "no interpreter \`$python\`; create .venv or set PYTHON=/path/to/python"
missing=$("$python" -c 'import importlib.util as u; print(*[n for n in ("torch", "yaml", "cv2", "ultralytics")
    if u.find_spec(n) is None])') || fail "$python does not run"
[[ -z $missing ]] || fail "$python lacks $missing; run $python -m pip install -r requirements.txt"
[[ -f ${trainer:-train_yolo_ddp.py} ]] || fail "no trainer ${trainer:-train_yolo_ddp.py}; check TRAIN_SCRIPT"

[[ -z $trainer ]] || export TRAIN_SCRIPT=$trainer
exec "$python" -m yolo_seg_ddp.training.launch "$@" # becomes torchrun, which receives this process's signals
