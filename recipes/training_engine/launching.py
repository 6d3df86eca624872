"""Starts a training function in several processes, on one machine or on each of several, which form
a process group.
"""

import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.distributed import (
    barrier,
    cleanup_ddp,
    collective_timeout_s,
    join_process_group,
    read_rank_environment,
)
from yolo_seg_ddp.utils.distributed.process_group import DEFAULT_PORT
from yolo_seg_ddp.utils.errors import (
    EXIT_STARTUP_TIMEOUT,
    EXIT_STOPPED_BY_SIGNAL,
    UserError,
    one_line,
    print_warning,
)

# The program of a rank. It first arranges to die with its parent, because importing PyTorch takes
# seconds.
_RANK = (
    "from yolo_seg_ddp.utils.signals import die_with_parent; die_with_parent(); "
    "from yolo_seg_ddp.utils.errors import run_script; from launching import run_rank; "
    "run_script(run_rank)"
)


def launch_distributed_training(
    train_fn: Callable[..., Any],
    world_size: int,
    backend: str = "nccl",
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "",
    master_port: int = DEFAULT_PORT,
    **kwargs: Any,
) -> None:
    """Call `train_fn(rank, nnodes * world_size, **kwargs)` in `world_size` processes of each
    machine, and wait.

    Machines 0 to `nnodes` - 1 each call this; they meet at `master_addr`, the address of machine 0.
    On a single one `train_fn` is called here as rank 0 of 1 when one process suffices or the
    processes cannot form a group. All arguments reach the processes through cloudpickle, so lambdas
    work. Raises UserError when training fails on a rank; no process is left then. When the training
    was stopped by a signal, SystemExit has the code 75.
    """
    world_size, backend = plan_ranks(world_size, backend, nnodes)
    if nnodes > 1 or world_size > 1:
        if not 0 <= node_rank < nnodes or (nnodes > 1 and not master_addr):
            lacking = (
                "several machines need master_addr, the address of machine 0, and each its "
                "node_rank below nnodes"
            )
            raise UserError(
                f"nnodes={nnodes}, node_rank={node_rank}, master_addr={master_addr!r}: {lacking}"
            )
        code = _run_ranks(
            (train_fn, kwargs),
            world_size,
            backend,
            nnodes,
            node_rank,
            f"{master_addr}:{master_port}",
        )
        if code == 0:
            return
        if code == EXIT_STOPPED_BY_SIGNAL:
            raise SystemExit(code)
        # alone, each machine would train a model of its own
        if code != EXIT_STARTUP_TIMEOUT or nnodes > 1:
            raise UserError(
                f"training failed on a rank (exit code {code}); the reason is printed above"
            )
        print_warning(
            "distributed set-up failed (the reason is printed above): training in a single process"
        )
    train_fn(0, 1, **kwargs)


def plan_ranks(world_size: int, backend: str, nnodes: int = 1) -> tuple[int, str]:
    """Return the number of processes and the backend that this machine can serve; print what
    differs.

    Raises UserError in a process of torchrun, where each process would start as many again.
    """
    if "RANK" in os.environ:
        raise UserError(
            "this script starts its processes itself: start it with python, without torchrun"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and world_size > gpus:
        print(f"{world_size} processes but {gpus} visible GPU(s): starting {gpus}")
        world_size = gpus
    world_size = max(world_size, 1)
    if not gpus and world_size * nnodes > 1 and backend == "nccl":
        print("No GPU: gloo instead of nccl")
        backend = "gloo"
    return world_size, backend


def _run_ranks(
    job: Any, num_processes: int, backend: str, nnodes: int, node_rank: int, endpoint: str
) -> int:
    """Run this machine's ranks with torchrun's agent; return 0 or the exit code of the rank that
    failed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise UserError(
            "cloudpickle is missing: pip install -r requirements.txt in this folder"
        ) from error
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the ranks print what is wrong
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    search = [str(Path(__file__).parent), *(path or os.getcwd() for path in sys.path)]
    threads, _ = choose_threads_and_workers(num_processes, 0)
    loopback = (
        {"GLOO_SOCKET_IFNAME": "lo"} if nnodes == 1 and sys.platform.startswith("linux") else {}
    )
    defaults = {"OMP_NUM_THREADS": str(threads), **loopback}
    name, place = ("static", endpoint) if nnodes > 1 else ("c10d", "127.0.0.1:0")
    known = {"rank": node_rank, "timeout": int(collective_timeout_s())} if nnodes > 1 else {}
    meeting: dict[str, Any] = {"rdzv_backend": name, "rdzv_endpoint": place, "rdzv_configs": known}
    config = LaunchConfig(
        nnodes, nnodes, num_processes, run_id="training-engine", max_restarts=0, **meeting
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        file = Path(folder) / "job"
        file.write_bytes(cloudpickle.dumps(job))
        before = dict(os.environ)
        os.environ.update({**defaults, **before, "PYTHONPATH": os.pathsep.join(search)})
        try:
            elastic_launch(config, sys.executable)("-P", "-c", _RANK, str(file), backend)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            # One rank's failure makes the agent stop the others: their codes say less.
            return max(
                codes,
                key=lambda code: (
                    code == EXIT_STARTUP_TIMEOUT,
                    code > 0 and code != EXIT_STOPPED_BY_SIGNAL,
                    code,
                ),
            )
        except SignalException:
            return EXIT_STOPPED_BY_SIGNAL
        except (DistNetworkError, DistStoreError) as error:
            raise UserError(
                f"the {nnodes} machines did not meet at {endpoint}: {one_line(error)}"
            ) from error
        finally:
            os.environ.clear()
            os.environ.update(before)
    return 0


def run_rank() -> int:
    """Run one of the processes of `launch_distributed_training`; return the exit code."""
    job = Path(sys.argv[1]).read_bytes()
    backend = sys.argv[2]
    ranks = read_rank_environment()
    try:
        join_process_group(ranks.rank, ranks.world_size, backend)
        # NCCL connects at the first collective.
        barrier()
    except (RuntimeError, ValueError) as error:
        print(f"[rank {ranks.rank}] {backend}: {one_line(error)}", file=sys.stderr, flush=True)
        return EXIT_STARTUP_TIMEOUT
    # written by our parent process, in a folder of its own
    train_fn, kwargs = pickle.loads(job)  # noqa: S301
    try:
        train_fn(ranks.rank, ranks.world_size, **kwargs)
    except SystemExit as end:
        return int(end.code or 0)
    cleanup_ddp()
    return 0
