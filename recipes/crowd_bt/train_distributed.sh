#!/usr/bin/env bash
# Starts train.py in N processes of this machine, one for each GPU, and passes on everything else.
set -euo pipefail

usage="usage: ./train_distributed.sh N [options of train.py], such as ./train_distributed.sh 4 --epochs 20 --batch-size 16"
folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)
project=$(cd -- "$folder/../.." >/dev/null && pwd)

fail() { # message, exit code
    echo "train_distributed.sh: $1" >&2
    exit "$2"
}

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || fail "\`${1:-}\` is not the number of GPUs (processes); $usage" 2
processes=$1
shift
port=${MASTER_PORT:-29500}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || fail "MASTER_PORT=$port is not a port" 2

if [[ -n ${PYTHON:-} ]]; then
    python=$PYTHON
elif [[ -n ${VIRTUAL_ENV:-} || ! -x $project/.venv/bin/python ]]; then
    python=$(command -v python || command -v python3 || echo python)
else
    python=$project/.venv/bin/python
fi
command -v "$python" >/dev/null || fail "no interpreter \`$python\`; set PYTHON=/path/to/python" 1

"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    fail "$python lacks torch; pip install -r requirements.txt" 1
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} # where utils is

# Refuses a busy port and more processes than GPUs, and shares the cores among the processes.
device=() previous=""
for argument in "$@"; do
    [[ $previous != --device ]] || device=(--device "$argument")
    [[ $argument != --device=* ]] || device=("$argument")
    previous=$argument
done
plan=$("$python" -m yolo_seg_ddp.training.launch --no-own-trainer --processes "$processes" --port "$port" \
    -- ${device[@]+"${device[@]}"}) || exit $?
read -r _ threads _ <<<"$plan"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}

# torchrun, without its report after a user's error
exec "$python" -m yolo_seg_ddp.utils.distributed.loopback --nproc_per_node="$processes" --master_port="$port" \
    "$folder/train.py" --distributed --world-size "$processes" "$@"
