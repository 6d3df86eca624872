"""Starts a measurement's ranks as processes, waits for them and reports why one failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.common.environment import PROJECT_FOLDER
from utils.common.errors import UserError
from utils.measure.scaling_rank import RankJob

_POLL_S = 0.05

# The tie to the parent comes first: importing PyTorch takes seconds, in which the parent may be killed.
_RANK_CODE = (
    "from utils.common.signals import die_with_parent; die_with_parent(only_under_torchrun=False); "
    "from utils.common.errors import run_script; from utils.measure.scaling_rank import main; run_script(main)"
)
_USER_ERROR = re.compile(r"^(\[rank \d+\] )?error: ")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")  # the last line of a traceback


def run_ranks(job: RankJob, world_size: int) -> list[dict[str, Any]]:
    """Start `world_size` ranks and return their answers in rank order; no process is left when this returns.

    Raises UserError with the reason of the first rank that failed, or when `job.timeout_s` is over.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_FOLDER)}
    environment.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if sys.platform.startswith("linux"):
        environment.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-ddp-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        deadline_s = time.monotonic() + job.timeout_s
        try:
            for rank in range(world_size):
                # -P: a folder `utils` where the user happens to stand is not ours.
                command = [sys.executable, "-P", "-c", _RANK_CODE, name]
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with _log_file(folder, rank).open("wb") as log:
                    processes.append(subprocess.Popen(command, env={**environment, **place}, stdout=log, stderr=log))
            _wait(processes, folder, deadline_s, job.timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((folder / f"rank{rank}.json").read_bytes()) for rank in range(world_size)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline_s: float, timeout_s: float) -> None:
    """Return when every rank is done. Raises UserError after the first failure or at the deadline."""
    of = f"of {len(processes)} process(es)"
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise UserError(f"rank {rank} {of} failed (code {code}): {_reason(_log_file(folder, rank))}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            missing = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise UserError(
                f"rank {missing} {of} not done after {timeout_s:g} s; raise --timeout-s, or lower --steps or --batch-size"
            )
        time.sleep(_POLL_S)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if _USER_ERROR.match(line) or _EXCEPTION.match(line)]
    return _USER_ERROR.sub("", (telling or lines or ["it said nothing"])[-1])


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"
