"""Start several processes of one machine as ranks, wait for them, and report why one failed.

This module imports PyTorch only inside a rank: `test_ddp.py` also runs where PyTorch is missing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolo_seg_ddp.utils.environment import python_path
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import write_text_atomic

if TYPE_CHECKING:
    import torch

_POLL_S = 0.05

# The tie to the parent comes first: importing PyTorch takes seconds, in which the parent may be
# killed. The parent may even be killed before the tie, hence its number. `run_script` leaves
# without the interpreter's teardown, in which a rank may abort although its work is done.
_PREPARE = (
    "from yolo_seg_ddp.utils.signals import die_with_parent; die_with_parent({parent_id}, "
    "only_under_torchrun=False); from yolo_seg_ddp.utils.errors import run_script; "
)
_USER_ERROR = re.compile(r"^(\[rank \d+\] )?error: ")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")  # the last line of a traceback


# --- in the process that starts the ranks ---------------------------------------------------------


def run_ranks(
    code: str,
    world_size: int,
    job: Mapping[str, Any],
    timeout_s: float,
    *,
    timeout_advice: str = "",
) -> list[Any]:
    """Run the Python statement `code` on `world_size` ranks; return what each passed to
    `write_answer`, in rank order.

    `code` imports a function and passes it to `run_script`. A rank finds torchrun's variables for
    its place, and `job` (plain values) through `read_job`. The answer is None for a rank that wrote
    none. No process is left at the end. Raises UserError with the reason of the first rank that
    failed, or when `timeout_s` has passed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        write_text_atomic(folder / "job.json", json.dumps(job))
        deadline_s = time.monotonic() + timeout_s
        prepare = _PREPARE.format(parent_id=os.getpid())
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        # The ranks talk on the loopback interface.
        if sys.platform.startswith("linux"):
            shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": world_size,
                }
                # -P: Python does not search the current folder, which may hold another
                # `yolo_seg_ddp`.
                command = [sys.executable, "-P", "-c", prepare + code, name]
                with (folder / f"rank{rank}.log").open("wb") as log:
                    environment = shared | {name: str(number) for name, number in place.items()}
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                    )
            late = _wait(processes, folder, deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if late:
            advice = f"; {timeout_advice}" if timeout_advice else ""
            raise UserError(
                f"rank {late} of {world_size} process(es) not done after {timeout_s:g} s{advice}"
            )
        files = [folder / f"rank{rank}.json" for rank in range(world_size)]
        return [json.loads(file.read_bytes()) if file.exists() else None for file in files]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> str:
    """Wait for all ranks; return the numbers of those that miss the deadline.

    Raises UserError when one fails.
    """
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                reason = _reason(folder / f"rank{rank}.log")
                raise UserError(
                    f"rank {rank} of {len(processes)} process(es) failed (code {code}): {reason}"
                )
        running = [str(rank) for rank, code in enumerate(codes) if code is None]
        if not running or time.monotonic() > deadline_s:
            return ", ".join(running)
        time.sleep(_POLL_S)


def _reason(log: Path) -> str:
    """Return the last line of a log that names an error, else its last line."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if _USER_ERROR.match(line) or _EXCEPTION.match(line)]
    return _USER_ERROR.sub("", (errors or lines or ["it printed nothing"])[-1])


# --- in a rank ------------------------------------------------------------------------------------


def read_job() -> dict[str, Any]:
    """Return the `job` of `run_ranks`."""
    job: dict[str, Any] = json.loads((_folder() / "job.json").read_bytes())
    return job


def write_answer(answer: Any) -> None:
    """Give plain values back to `run_ranks`."""
    write_text_atomic(_folder() / f"rank{os.environ['RANK']}.json", json.dumps(answer))


def join_ranks(device: torch.device, timeout_s: float, backend: str | None = None) -> None:
    """Join the process group of all ranks; `backend` unset: NCCL for a GPU, gloo for the CPU.

    The ranks meet through a file: no port can be taken already, and nothing listens on the network.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        init_method=f"file://{_folder().resolve() / 'rendezvous'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def _folder() -> Path:
    return Path(sys.argv[1])
