"""Starts a training for `train_ddp.sh`: reads its command line, checks what cannot work, and
becomes torchrun.

    python -m yolo_seg_ddp.training.launch [N] [BATCH] [EPOCHS] [IMG_SIZE] \\
        [launcher options] [-- trainer options]
    python -m yolo_seg_ddp.training.launch --no-own-trainer --processes N --port PORT \\
        -- trainer options

The second form is for other launchers: it only prints `PROCESSES THREADS DEVICE`. Both start in a
tenth of a second, because PyTorch is imported only where there is a GPU driver.
"""

import argparse
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.environment import visible_gpu_count
from yolo_seg_ddp.utils.errors import EXIT_USAGE, UserError, run_script
from yolo_seg_ddp.utils.option_names import known_name, other_names

USAGE = (
    "usage: bash train_ddp.sh [N] [BATCH] [EPOCHS] [IMG_SIZE] [launcher options] [-- trainer "
    "options]"
)
CPU_PROCESSES = 2
DATA_CURE = (
    "run python download_data.py && python parse_labels.py, or name another data set with --data "
    "FILE"
)
# the trainer's options that its launch depends on
SETTINGS = ("data", "device", "num_workers", "resume", "config")
# torchrun's own options that are handed on.
HANDED_ON = (
    *(
        "max-restarts",
        "monitor-interval",
        "log-dir",
        "redirects",
        "tee",
        "local-ranks-filter",
        "local-addr",
    ),
    *("rdzv-id", "shutdown-timeout"),
)
# Slurm can announce the time limit by SIGUSR1; torchrun passes on only the signals named here.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
# A machine that is silent for 10 s counts as lost (torchrun: 15 s). The others wait 5 s for a new
# machine before they continue (torchrun: 30 s). A machine may also join later: then all save a
# checkpoint and restart.
ELASTIC_SETTINGS = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5"


# --- the command line -----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Name the mistake and the usage in two lines."""
        print(f"train_ddp.sh: {message}", USAGE, sep="\n", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def read_launch(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Read the words after `train_ddp.sh` and its variables; Kubeflow's PET_ names serve where ours
    are unset.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("numbers", nargs="*")
    for name in ("master-port", "rdzv-conf", *HANDED_ON):
        short = {"redirects": ["-r"], "tee": ["-t"]}.get(name, [])
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", *short, metavar="VALUE")
    launcher_arguments, trainer_arguments = _split(list(arguments))
    options, unknown = parser.parse_known_args(launcher_arguments)
    for word in unknown:
        flag = word.partition("=")[0]
        parser.error(
            f"{flag} is not a launcher option; trainer options stand after --, as in: -- {word}"
        )
    for number in options.numbers:
        if not re.fullmatch("[1-9][0-9]*", number):
            parser.error(f"`{number}` is not a whole number above 0")
    if len(options.numbers) > 4:
        parser.error(f"unexpected `{options.numbers[4]}`: four numbers at most")

    def variable(name: str) -> str | None:
        return environment.get(name) or environment.get(f"PET_{name}")

    processes, *trainer_numbers = options.numbers or [environment.get("PET_NPROC_PER_NODE", "")]
    options.processes = int(processes) if re.fullmatch("[1-9][0-9]*", processes) else None
    flags = zip(("--batch-size", "--epochs", "--img-size"), trainer_numbers, strict=False)
    options.trainer_arguments = [*(word for pair in flags for word in pair), *trainer_arguments]
    options.nodes = variable("NNODES") or "1"
    options.node_rank = variable("NODE_RANK")
    options.master_addr = variable("MASTER_ADDR")
    options.master_port = options.master_port or variable("MASTER_PORT")
    if not re.fullmatch("[1-9][0-9]*(:[1-9][0-9]*)?", options.nodes):
        parser.error(f"NNODES={options.nodes} is neither a number nor MIN:MAX")
    if options.node_rank and not options.node_rank.isdecimal():
        parser.error(f"NODE_RANK={options.node_rank} is not a number")
    if options.master_port and not re.fullmatch("[1-9][0-9]{0,4}", options.master_port):
        parser.error(f"MASTER_PORT={options.master_port} is not a port")
    if options.nodes != "1" and not options.master_addr:
        parser.error(f"NNODES={options.nodes} needs MASTER_ADDR, the address of the first machine")
    return options


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    position = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:position], arguments[position + 1 :]


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchPlan:
    """What one node starts: `threads` is OMP_NUM_THREADS for each process; `device`
    is cpu or cuda.
    """

    processes: int
    threads: int
    device: str


def plan_launch(
    processes: int | None, trainer_arguments: Sequence[str], gpus: int, cores: int | None = None
) -> LaunchPlan:
    """Choose processes and threads: one GPU for each process, and no more threads than cores.

    Raises UserError when there are fewer GPUs than requested processes.
    """
    settings = trainer_settings(trainer_arguments)
    device = "cpu" if settings["device"] == "cpu" or not gpus else "cuda"
    if processes is None:
        processes = gpus if device == "cuda" else CPU_PROCESSES
    if device == "cuda" and processes > gpus:
        raise UserError(
            f"{processes} processes but {gpus} visible GPU(s): one GPU takes one process; "
            f"run bash train_ddp.sh {gpus}, or check CUDA_VISIBLE_DEVICES"
        )
    workers = str(settings["num_workers"])
    threads, _ = choose_threads_and_workers(
        processes, int(workers) if workers.isdigit() else None, device, cores
    )
    return LaunchPlan(processes, threads, device)


def require_dataset(trainer_arguments: Sequence[str], default_data: Path | None) -> None:
    """Raise UserError unless the trainer's data set has training and validation images."""
    settings = trainer_settings(trainer_arguments)
    data_file = settings["data"] or (None if settings["resume"] else default_data)
    # A resumed run's config.yaml names its data set.
    if data_file is None:
        return
    spec = load_dataset_yaml(str(data_file), trust_links=settings["trust_links"] is True)
    for split in ("train", "val"):
        try:
            spec.image_files(split)
        except UserError as error:
            if Path(data_file).resolve() != DEFAULT_DATASET_YAML:
                raise
            raise UserError(f"{str(error).split(';')[0]}; {DATA_CURE}") from error


def require_free_port(port: int) -> None:
    """Raise UserError when something on this machine already listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"MASTER_PORT={port} cannot be used ({error}); unset it or choose another"
            ) from error


def trainer_settings(trainer_arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of any trainer that its launch depends on: as flags, else in its
    `--config` file, else None.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in SETTINGS:
        flags = [f"--{each.replace('_', '-')}" for each in (name, *other_names(name, SETTINGS))]
        # The trainer refuses a missing value.
        parser.add_argument(*flags, nargs="?")
    parser.add_argument("--trust-links", action=argparse.BooleanOptionalAction)
    settings = vars(parser.parse_known_args(list(trainer_arguments))[0])
    file = settings["config"]
    try:
        content = (
            read_back(Path(file), lambda content: content, "correct the file", is_yaml=True)
            if file
            else None
        )
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}") from error
    given = content.items() if isinstance(content, dict) else ()
    in_file = {known_name(str(key).replace("-", "_"), SETTINGS): value for key, value in given}
    return {name: in_file.get(name) if value is None else value for name, value in settings.items()}


# --- the launch -----------------------------------------------------------------------------------


def torchrun_command(options: argparse.Namespace, processes: int, trainer: str) -> list[str]:
    """Return the command that starts the processes of this machine; `options` comes from
    `read_launch`.
    """
    settings = options.rdzv_conf
    port = options.master_port or "29500"
    words = ["--nproc-per-node", str(processes), "--nnodes", options.nodes]
    if options.nodes == "1":
        # torchrun with its store on the loopback interface. With port 0 the store chooses a free
        # port itself, so no other program can take the port in between.
        words += [
            "--rdzv-backend",
            "loopback",
            "--rdzv-endpoint",
            f"127.0.0.1:{options.master_port or 0}",
        ]
        words += [
            "--rdzv-id",
            f"train-{os.getpid()}-{secrets.token_hex(4)}",
            "--local-addr",
            "127.0.0.1",
        ]
    elif ":" in options.nodes or not options.node_rank:
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{options.master_addr}:{port}"]
        words += ["--rdzv-id", "yolo-seg-ddp"]
        is_host = (
            f"is_host={str(int(options.node_rank) == 0).lower()}" if options.node_rank else None
        )
        settings = ",".join(filter(None, [ELASTIC_SETTINGS, is_host, settings]))
    else:
        words += [
            "--node-rank",
            options.node_rank,
            "--master-addr",
            options.master_addr,
            "--master-port",
            port,
        ]
    words += ["--rdzv-conf", settings] if settings else []
    words += ["--signals-to-handle", SIGNALS]
    for name in HANDED_ON:
        value = getattr(options, name.replace("-", "_"))
        words += [f"--{name}", value] if value is not None else []
    return [
        sys.executable,
        "-m",
        "yolo_seg_ddp.utils.distributed.loopback",
        *words,
        trainer,
        *options.trainer_arguments,
    ]


def main() -> None:
    """Check, say what starts, and become torchrun, which then receives this process's signals."""
    if sys.argv[1:2] == ["--no-own-trainer"]:
        return print_plan(*_split(sys.argv[1:]))
    options = read_launch(sys.argv[1:], os.environ)
    trainer = os.environ.get("TRAIN_SCRIPT")
    if options.nodes == "1" and options.master_port:
        require_free_port(int(options.master_port))
    if not {"--help", "-h"} & set(options.trainer_arguments):
        require_dataset(options.trainer_arguments, None if trainer else DEFAULT_DATASET_YAML)
    plan = plan_launch(options.processes, options.trainer_arguments, visible_gpu_count())
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(plan.threads),
        # With one store for the whole job, restarted workers read the addresses of dead ones
        # (pytorch issue 135712), and a lost machine cannot be replaced.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        or "1",
    }
    command = torchrun_command(options, plan.processes, trainer or "train_yolo_ddp.py")
    print(
        f"Starting {plan.processes} process(es) on {plan.device}, {variables['OMP_NUM_THREADS']} "
        "thread(s) each"
    )
    if os.environ.get("DRY_RUN") == "1":
        print(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command]))
        return None
    # One machine needs no network.
    if options.nodes == "1" and sys.platform.startswith("linux"):
        variables |= {
            name: os.environ.get(name) or "lo"
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
    sys.stdout.flush()
    os.execve(sys.executable, command, {**os.environ, **variables})


def print_plan(launcher_arguments: list[str], trainer_arguments: list[str]) -> None:
    """Print the plan of a launcher that starts its processes itself."""
    parser = _Parser(add_help=False)
    parser.add_argument("--no-own-trainer", action="store_true")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--port", type=int)
    given = parser.parse_args(launcher_arguments)
    if given.port is not None:
        require_free_port(given.port)
    require_dataset(trainer_arguments, None)
    plan = plan_launch(given.processes, trainer_arguments, visible_gpu_count())
    print(plan.processes, plan.threads, plan.device)


if __name__ == "__main__":
    run_script(main)
