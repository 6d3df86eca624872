"""Starts a training function in several processes of this machine, which form a process group."""

import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils.common.cores import choose_threads_and_workers
from utils.common.errors import EXIT_STARTUP_TIMEOUT, EXIT_STOPPED_BY_SIGNAL, UserError, one_line, print_warning
from utils.distributed import barrier, cleanup_ddp, join_process_group, read_rank_environment

# The program of a rank. It first arranges to die with its parent, because importing PyTorch takes seconds.
_RANK = (
    "from utils.common.signals import die_with_parent; die_with_parent(); "
    "from utils.common.errors import run_script; from launching import run_rank; run_script(run_rank)"
)


def launch_distributed_training(
    train_fn: Callable[..., Any], world_size: int, backend: str = "nccl", **kwargs: Any
) -> None:
    """Call `train_fn(rank, world_size, **kwargs)` in `world_size` processes, which form a process group, and wait.

    With at most one process, and when the processes cannot form a group, it is called here as rank 0 of 1. All arguments
    reach the processes through cloudpickle, so lambdas work. Raises UserError when training fails on a rank; no
    process is left then. When the training was stopped by a signal, SystemExit has the code 75.
    """
    world_size, backend = plan_ranks(world_size, backend)
    if world_size > 1:
        code = _run_ranks((train_fn, kwargs), world_size, backend)
        if code == 0:
            return
        if code == EXIT_STOPPED_BY_SIGNAL:
            raise SystemExit(code)
        if code != EXIT_STARTUP_TIMEOUT:
            raise UserError(f"training failed on a rank (exit code {code}); the reason is printed above")
        print_warning("distributed set-up failed (the reason is printed above): training in a single process")
    train_fn(0, 1, **kwargs)


def plan_ranks(world_size: int, backend: str) -> tuple[int, str]:
    """Return the number of processes and the backend that this machine can serve; print what differs.

    Raises UserError in a process of torchrun, where each process would start as many again.
    """
    if "RANK" in os.environ:
        raise UserError("this script starts its processes itself: start it with python, without torchrun")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and world_size > gpus:
        print(f"{world_size} processes but {gpus} visible GPU(s): starting {gpus}")
        world_size = gpus
    if not gpus and world_size > 1 and backend == "nccl":
        print("No GPU: gloo instead of nccl")
        backend = "gloo"
    return world_size, backend


def _run_ranks(job: Any, world_size: int, backend: str) -> int:
    """Run the ranks with torchrun's agent; return 0 or the exit code of the rank that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks print what is wrong
    search = [str(Path(__file__).parent), *(path or os.getcwd() for path in sys.path)]
    threads, _ = choose_threads_and_workers(world_size, 0)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
    defaults = {"OMP_NUM_THREADS": str(threads), **loopback}
    meeting: dict[str, Any] = {"run_id": "training-engine", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    config = LaunchConfig(1, 1, world_size, **meeting, max_restarts=0, monitor_interval=0.1)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        file = Path(folder) / "job"
        file.write_bytes(_pickled(job))
        before = dict(os.environ)
        os.environ.update({**defaults, **before, "PYTHONPATH": os.pathsep.join(search)})
        try:
            elastic_launch(config, sys.executable)("-P", "-c", _RANK, str(file), backend)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            # One rank's failure makes the agent stop the others: their codes say less.
            return max(
                codes,
                key=lambda code: (code == EXIT_STARTUP_TIMEOUT, code > 0 and code != EXIT_STOPPED_BY_SIGNAL, code),
            )
        except SignalException:
            return EXIT_STOPPED_BY_SIGNAL
        finally:
            os.environ.clear()
            os.environ.update(before)
    return 0


def _pickled(job: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise UserError("cloudpickle is missing: pip install -r requirements.txt in this folder") from error
    return bytes(cloudpickle.dumps(job))


def run_rank() -> int:
    """Run one of the processes of `launch_distributed_training`; return the exit code."""
    job, backend = Path(sys.argv[1]).read_bytes(), sys.argv[2]
    ranks = read_rank_environment()
    try:
        join_process_group(ranks.rank, ranks.world_size, backend)
        barrier()  # NCCL connects at the first collective
    except (RuntimeError, ValueError) as error:
        print(f"[rank {ranks.rank}] {backend}: {one_line(error)}", file=sys.stderr, flush=True)
        return EXIT_STARTUP_TIMEOUT
    train_fn, kwargs = pickle.loads(job)  # noqa: S301 # written by our parent process, in a folder of its own
    try:
        train_fn(ranks.rank, ranks.world_size, **kwargs)
    except SystemExit as end:
        return int(end.code or 0)
    cleanup_ddp()
    return 0
