"""Plans how `train_ddp.sh` starts a run; refuses a run that cannot work before any process starts.

`python -m utils.training.launch [--processes N] -- TRAINER FLAGS` prints `PROCESSES THREADS DEVICE`. It starts in a tenth of a
second because it imports PyTorch only where there is a GPU driver.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.common.config import Options, option, parse_config
from utils.common.cores import choose_threads_and_workers
from utils.common.environment import visible_gpu_count
from utils.common.errors import UserError, run_script
from utils.common.files import read_text
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml

CPU_PROCESSES = 2
DATA_CURE = "run python download_data.py && python parse_labels.py, or name another data set with --data FILE"


@dataclass(frozen=True)
class LaunchConfig(Options):
    processes: int | None = option(None, "processes on this node; unset: one for each visible GPU, else 2", metavar="N")
    port: int | None = option(None, "port which must be free on this machine", metavar="PORT")
    own_trainer: bool = option(True, "the trainer is train_yolo_ddp.py, which reads dataset.yaml by default")


@dataclass(frozen=True)
class LaunchPlan:
    """What one node starts: `threads` is OMP_NUM_THREADS for each process; `device` is cpu or cuda."""

    processes: int
    threads: int
    device: str


def main() -> None:
    own_arguments, trainer_arguments = _split(sys.argv[1:])
    config = parse_config(LaunchConfig, "Plan a launch for train_ddp.sh.", own_arguments)
    if config.port is not None:
        require_free_port(config.port)
    if not {"--help", "-h"} & set(trainer_arguments):
        require_dataset(trainer_arguments, DEFAULT_DATASET_YAML if config.own_trainer else None)
    plan = plan_launch(config.processes, trainer_arguments, visible_gpu_count())
    print(plan.processes, plan.threads, plan.device)


def plan_launch(
    processes: int | None, trainer_arguments: Sequence[str], gpus: int, cores: int | None = None
) -> LaunchPlan:
    """Choose processes and threads: one GPU for each process, and no more threads than cores.

    Raises UserError when there are fewer GPUs than requested processes.
    """
    device = "cpu" if trainer_setting(trainer_arguments, "device") == "cpu" or not gpus else "cuda"
    if processes is None:
        processes = gpus if device == "cuda" else CPU_PROCESSES
    if device == "cuda" and processes > gpus:
        raise UserError(
            f"{processes} processes but {gpus} visible GPU(s): one GPU takes one process; "
            f"run bash train_ddp.sh {gpus}, or check CUDA_VISIBLE_DEVICES"
        )
    workers = str(trainer_setting(trainer_arguments, "num_workers"))
    requested_workers = int(workers) if workers.isdigit() else None
    threads, _ = choose_threads_and_workers(processes, requested_workers, device, cores)
    return LaunchPlan(processes, threads, device)


def require_dataset(trainer_arguments: Sequence[str], default_data: Path | None) -> None:
    """Raise UserError unless the trainer's data set has training and validation images."""
    data_file = trainer_setting(trainer_arguments, "data")
    if data_file is None and any(argument.split("=")[0] == "--resume" for argument in trainer_arguments):
        return  # the resumed run's config.yaml names its data set
    if data_file is None and default_data is None:
        return
    spec = load_dataset_yaml(str(data_file or default_data), trust_links=_is_on(trainer_arguments, "trust_links"))
    for split in ("train", "val"):
        try:
            spec.image_files(split)
        except UserError as error:
            raise UserError(f"{str(error).split(';')[0]}; {DATA_CURE}") from error


def require_free_port(port: int) -> None:
    """Raise UserError when something on this machine already listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UserError(f"MASTER_PORT={port} cannot be used ({error}); unset it or choose another") from error


def trainer_setting(trainer_arguments: Sequence[str], name: str) -> Any:
    """Return the trainer's value of an option: its flag, else the key in its `--config` file, else None."""
    flag = "--" + name.replace("_", "-")
    value: Any = _last_value(trainer_arguments, flag)
    config_file = _last_value(trainer_arguments, "--config")
    if value is None and config_file is not None:
        try:
            content = yaml.safe_load(read_text(Path(config_file)))
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"--config {config_file}: {' '.join(str(error).split())}") from error
        if isinstance(content, dict):
            value = content.get(name, content.get(name.replace("_", "-")))
    return value


def _is_on(trainer_arguments: Sequence[str], name: str) -> bool:
    """Return whether the trainer's option without a value is given: its last flag, else the key in its `--config` file."""
    flag = name.replace("_", "-")
    given = [argument == f"--{flag}" for argument in trainer_arguments if argument in (f"--{flag}", f"--no-{flag}")]
    return given[-1] if given else trainer_setting(trainer_arguments, name) is True


def _last_value(arguments: Sequence[str], flag: str) -> str | None:
    value = None
    for position, argument in enumerate(arguments):
        if argument.startswith(flag + "="):
            value = argument[len(flag) + 1 :]
        elif argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
    return value


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    position = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:position], arguments[position + 1 :]


if __name__ == "__main__":
    run_script(main)
