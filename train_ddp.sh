#!/usr/bin/env bash
# Starts distributed training with torchrun: chooses the number of processes and passes on everything else.
set -euo pipefail

usage_line="usage: bash train_ddp.sh [N] [BATCH] [EPOCHS] [IMG_SIZE] [launcher options] [-- trainer options]"

usage() {
    cat <<TEXT
$usage_line

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

wrong_usage() {
    echo "train_ddp.sh: $1" >&2
    echo "$usage_line" >&2
    exit 2
}

absolute() { # makes a path with a folder absolute, so it stays valid after cd; leaves a bare command name unchanged
    case $1 in
        /*) echo "$1" ;;
        */*) echo "$PWD/$1" ;;
        *) if [[ -e $1 ]]; then echo "$PWD/$1"; else echo "$1"; fi ;;
    esac
}

# --- arguments: numbers, then launcher options, then -- and trainer options ---

processes="" batch="" epochs="" image_size=""
for name in processes batch epochs image_size; do
    [[ $# -gt 0 && $1 != -* ]] || break
    [[ $1 =~ ^[1-9][0-9]*$ ]] || wrong_usage "\`$1\` is not a whole number above 0"
    printf -v "$name" '%s' "$1"
    shift
done
# Kubeflow sets the same values under torchrun's names.
master_port=${MASTER_PORT:-${PET_MASTER_PORT:-}}
master_address=${MASTER_ADDR:-${PET_MASTER_ADDR:-}}
node_rank=${NODE_RANK:-${PET_NODE_RANK:-}}
nodes=${NNODES:-${PET_NNODES:-1}}
rendezvous_settings="" # the user's --rdzv-conf, merged with ours below; torchrun itself uses only the last one
launcher=(--nproc-per-node)
launcher_options=(--) # never empty: bash before 4.4 cannot expand an empty array under set -u
while [[ $# -gt 0 && $1 != -- ]]; do
    option=${1%%=*}
    case ${option//_/-} in
        -h | --help) usage; exit 0 ;;
        --master-port)
            if [[ $1 == *=* ]]; then master_port=${1#*=}; else master_port=${2:-}; shift; fi
            [[ $# -gt 0 && -n $master_port ]] || wrong_usage "--master-port needs a port"
            ;;
        --rdzv-conf)
            if [[ $1 == *=* ]]; then rendezvous_settings=${1#*=}; else rendezvous_settings=${2:-}; shift; fi
            [[ $# -gt 0 && -n $rendezvous_settings ]] || wrong_usage "--rdzv-conf needs settings, as in last_call_timeout=10"
            ;;
        --max-restarts | --monitor-interval | --log-dir | --redirects | -r | --tee | -t | --local-ranks-filter | \
            --local-addr | --rdzv-id | --shutdown-timeout) launcher_options+=("$1") ;;
        -*) wrong_usage "$option is not a launcher option; trainer options stand after --, as in: -- $1" ;;
        *)
            [[ ${#launcher_options[@]} -gt 1 ]] || wrong_usage "unexpected \`$1\`: four numbers at most"
            launcher_options+=("$1")
            ;;
    esac
    shift
done
[[ $# -eq 0 ]] || shift # the --; the rest are trainer options
[[ -z $image_size ]] || set -- --img-size "$image_size" "$@"
[[ -z $epochs ]] || set -- --epochs "$epochs" "$@"
[[ -z $batch ]] || set -- --batch-size "$batch" "$@"

[[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || wrong_usage "NNODES=$nodes is neither a number nor MIN:MAX"
[[ ${node_rank:-0} =~ ^[0-9]+$ ]] || wrong_usage "NODE_RANK=$node_rank is not a number"
[[ -n $processes || ! ${PET_NPROC_PER_NODE:-} =~ ^[1-9][0-9]*$ ]] || processes=$PET_NPROC_PER_NODE
[[ -z $master_port || $master_port =~ ^[1-9][0-9]{0,4}$ ]] || wrong_usage "MASTER_PORT=$master_port is not a port"
if [[ $nodes != 1 && -z $master_address ]]; then
    wrong_usage "NNODES=$nodes needs MASTER_ADDR, the address of the first machine"
fi

# --- the machine: an interpreter, its packages, the data, cores and GPUs ---

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

plan_options=(--own-trainer)
[[ -z $trainer ]] || plan_options=(--no-own-trainer)
[[ -z $processes ]] || plan_options+=(--processes "$processes")
[[ $nodes != 1 || -z $master_port ]] || plan_options+=(--port "$master_port")
plan=$("$python" -m utils.training.launch "${plan_options[@]}" -- "$@") || exit $?
read -r processes threads device <<<"$plan"

# --- the launch ---

launcher+=("$processes" --nnodes "$nodes")
module=torch.distributed.run
if [[ $nodes == 1 ]]; then
    # torchrun with its store on the loopback interface. With port 0 the store chooses a free port itself, so no other
    # program can take the port in between.
    module=utils.distributed.loopback
    launcher+=(--rdzv-backend loopback --rdzv-endpoint "127.0.0.1:${master_port:-0}"
        --rdzv-id "train-$$-$RANDOM" --local-addr 127.0.0.1)
    if [[ $(uname) == Linux ]]; then # one machine needs no network
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
    fi
elif [[ $nodes == *:* || -z $node_rank ]]; then
    launcher+=(--rdzv-backend c10d --rdzv-endpoint "$master_address:${master_port:-29500}" --rdzv-id yolo-seg-ddp)
    # A machine that is silent for 10 s counts as lost (torchrun: 15 s). The others wait 5 s for a new machine before they
    # continue (torchrun: 30 s). A machine may also join later: then all save a checkpoint and restart.
    settings=keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5
    [[ -z $node_rank ]] || settings+=,is_host=$([[ $node_rank == 0 ]] && echo true || echo false)
    rendezvous_settings=$settings${rendezvous_settings:+,$rendezvous_settings}
else
    launcher+=(--node-rank "$node_rank" --master-addr "$master_address" --master-port "${master_port:-29500}")
fi
[[ -z $rendezvous_settings ]] || launcher+=(--rdzv-conf "$rendezvous_settings")
# Slurm can announce the time limit by SIGUSR1; torchrun passes on only the signals named here.
launcher+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" "${launcher_options[@]:1}")

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# With one store for the whole job, restarted workers read the addresses of dead ones (pytorch issue 135712), and a lost
# machine cannot be replaced.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
command=("$python" -m "$module" "${launcher[@]}" "${trainer:-train_yolo_ddp.py}" "$@")

echo "Starting $processes process(es) on $device, $OMP_NUM_THREADS thread(s) each"
if [[ ${DRY_RUN:-0} == 1 ]]; then
    for name in OMP_NUM_THREADS TORCH_DISABLE_SHARE_RDZV_TCP_STORE; do printf '%s=%s ' "$name" "${!name}"; done
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}" # replaces this process, so the launcher receives its signals
