"""Real gloo ranks of a test, and commands in processes forked from a server that has imported
PyTorch.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from yolo_seg_ddp.utils.distributed import cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.signals import die_with_parent

# --- Runs a function in real processes that form one gloo group, for the tests of everything
# distributed

# What most ranks and commands import; every optimizer of PyTorch imports torch._dynamo, which takes
# 2.5 s.
PRELOADED = [
    *(
        "tests.support.ranks",
        "ultralytics.nn.tasks",
        "torchvision.ops",
        "torch._dynamo",
        "torch.utils.tensorboard",
    ),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
]


class RankFailed(Exception):
    """A rank raised (the message holds its traceback), died, or ran out of time."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 300.0,
    join: bool = True,
) -> list[Any]:
    """Call `function(*args)` on `world_size` fresh processes and return their results in rank
    order.

    The function and its arguments must be picklable, its result a plain value (NumPy arrays yes,
    tensors no). Each process finds torchrun's variables in its environment and uses one thread;
    without `join` it has to make the process group by itself. Raises RankFailed after the first
    failure or `timeout_s`; no process outlives the call.
    """
    # The meeting point lives here, on a port the system chose and we hold: no rank can find it
    # taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Forked from a server that has imported PyTorch but never computed with it: as clean as a fresh
    # interpreter, and without the two seconds that each import takes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes, receivers = [], {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, rank, world_size, store.port, join, function, args)
            processes.append(context.Process(target=_run_rank, args=arguments, name=f"rank {rank}"))
            processes[-1].start()
            sender.close()  # now only the rank holds it, and its death reads as the end of the pipe
            receivers[receiver] = rank
        return _collect(receivers, timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5 if process.exitcode is None and not receivers else 0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(receivers: dict[Connection, int], timeout_s: float) -> list[Any]:
    """Wait for every rank's answer; `receivers` is emptied as they come."""
    results = {}
    deadline_s = time.monotonic() + timeout_s
    while receivers:
        ready = wait(list(receivers), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise RankFailed(f"not done after {timeout_s:g} s: ranks {sorted(receivers.values())}")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = receivers[receiver]
            succeeded, answer = _receive(receiver, rank)
            del receivers[receiver]
            if not succeeded:
                _require_alive(receivers)
                raise RankFailed(f"rank {rank} raised\n{answer}")
            results[rank] = answer
    return [results[rank] for rank in sorted(results)]


def _receive(receiver: Connection, rank: int) -> Any:
    try:
        return receiver.recv()
    except EOFError as error:
        raise RankFailed(f"rank {rank} died without an answer") from error


def _require_alive(receivers: dict[Connection, int]) -> None:
    """Raise for a dead rank: the others fail because they lost it, and their answers may arrive
    before its end.
    """
    for receiver in wait(list(receivers), timeout=0.5 if receivers else 0):
        assert isinstance(receiver, Connection)
        _receive(receiver, receivers[receiver])


def _run_rank(
    sender: Connection,
    rank: int,
    world_size: int,
    port: int,
    join: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    die_with_parent(only_under_torchrun=False)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store already runs in the parent
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        if join:
            setup_ddp(torch.device("cpu"))
        sender.send((True, function(*args)))
        cleanup_ddp()
    except Exception:  # noqa: BLE001 # whatever it is, the parent shows it
        sender.send((False, traceback.format_exc()))


# --- Runs the project's Python commands in processes forked from a server that has imported PyTorch

PROJECT = Path(__file__).resolve().parents[2]


def run_forked(
    words: list[str],
    environment: dict[str, str],
    timeout_s: float,
    prepare: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the words of a command after `python`, which is a file or `-m module`, from the project's
    folder.

    Like a new interpreter's, but for variables that PyTorch reads when it is imported. The process
    calls `prepare` before. Raises subprocess.TimeoutExpired.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, "stdout"), Path(name, "stderr")]
        process = context.Process(target=_be_the_command, args=(words, environment, files, prepare))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout_s)
        printed, errors = (file.read_text() if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(words, process.exitcode, printed, errors)


def _be_the_command(
    words: list[str],
    environment: dict[str, str],
    files: list[Path],
    prepare: Callable[[], None] | None,
) -> None:
    os.chdir(PROJECT)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path[:0] = [str(PROJECT if is_module else Path(words[0]).resolve().parent), str(PROJECT)]
    if prepare is not None:
        prepare()
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
