"""Before the process group: ranks that work at their own pace, machines that share a folder, and
ranks that fail or die.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.plugin import free_port
from tests.support.ranks import run_forked, run_ranks
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import EXIT_STARTUP_TIMEOUT

HOST = socket.gethostname()
SLOW_S = 6.0  # more than each limit of `at_their_own_pace`


def at_their_own_pace(folders: list[Path]) -> dict[str, Any]:
    """Stand for machines of two ranks, of one and of one; the first and the last share a folder.

    Rank 2 is slow.
    """
    ranks = distributed.read_rank_environment()
    local_rank, machine = ((0, 0), (1, 0), (0, 1), (0, 2))[ranks.rank]
    os.environ |= {"GROUP_RANK": str(machine), "INIT_TIMEOUT": "5", "NCCL_TIMEOUT": "3"}
    ranks = distributed.RankInfo(ranks.rank, local_rank, ranks.world_size, (2, 1, 1)[machine])
    with distributed.meet(ranks) as meeting:
        found: dict[str, Any] = {"hosts": meeting.hosts, "is first": meeting.is_first}
        found["sharers"] = meeting.sharers("cache", folders[machine])
        found["in time"] = meeting.sharers("run", folders[0] if machine else folders[1], wait_s=0.3)
        with meeting.first_on_machine():
            found["opened"] = time.monotonic()
            if ranks.rank in (0, 2):
                time.sleep(SLOW_S if ranks.rank == 2 else 0.3)
        found["told"] = meeting.exchange("ready", ranks.rank)
        found["ready"] = time.monotonic()
        distributed.setup_ddp(torch.device("cpu"), ranks, meeting.store)

    def photographs() -> Iterator[int]:
        time.sleep(3.5 if ranks.rank == 2 else 0)
        yield ranks.rank

    found["alone"] = [*distributed.apart(photographs())]
    found["sum"] = distributed.all_reduce_sum(torch.ones(1)).item()

    def work() -> str:
        time.sleep(3.5)
        return "at last"

    found["from main"] = distributed.run_on_main(work)
    return found


def test_a_rank_may_work_longer_than_every_limit_and_machines_find_what_they_share(
    tmp_path: Path,
) -> None:
    """One that packed twenty minutes longer than the others ended all with exit code 76."""
    folders = [tmp_path / "shared", tmp_path / "own", tmp_path / "shared"]
    answers = run_ranks(at_their_own_pace, 4, folders, join=False)
    assert all(
        answer["hosts"] == [f"{HOST}/{number}" for number in (1, 2, 3)] for answer in answers
    )
    assert [answer["is first"] for answer in answers] == [True, False, True, True]
    assert [answer["sharers"] for answer in answers] == [[0, 2], [0, 2], [1], [0, 2]]
    assert [answer["in time"] for answer in answers] == [[0], [0], [1, 2], [1, 2]]
    assert not [*tmp_path.glob("*/*")], "the files by which machines find each other are gone"
    assert answers[1]["opened"] - answers[0]["opened"] >= 0.3, (
        "the second rank of a machine opens what the first has made"
    )
    assert all(answer["ready"] - answers[2]["opened"] >= SLOW_S for answer in answers)
    assert all(answer["told"] == [0, 1, 2, 3] and answer["sum"] == 4 for answer in answers)
    assert [answer["alone"] for answer in answers] == [[0], [1], [2], [3]]
    assert [answer["from main"] for answer in answers] == ["at last", None, None, None]


PROGRAM = """
import os, signal, time
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import UserError, run_script

def fail(text):
    raise UserError(text)

def main():
    with distributed.meet(distributed.read_rank_environment()) as meeting:
        meeting.exchange("begun")
        {work}
run_script(main)
"""
WAIT, NO_ROOM = "meeting.exchange('ready')", "fail('no room for the cache')"
FAILURES: dict[str, tuple[str, str, int, list[str]]] = {
    "while another works": (
        "time.sleep(60)",
        NO_ROOM,
        1,
        [f"error: {HOST}/2: no room for the cache", "[rank 1] error: no room for the cache"],
    ),
    "while another waits": (
        WAIT,
        NO_ROOM,
        1,
        [f"error: {HOST}/2: no room for the cache", "[rank 1] error: no room for the cache"],
    ),
    "rank 0": (NO_ROOM, WAIT, 1, ["error: no room for the cache"]),
    "both alike": (NO_ROOM, NO_ROOM, 1, ["error: no room for the cache"]),
    "killed": (
        WAIT,
        "os.kill(os.getpid(), signal.SIGKILL)",
        EXIT_STARTUP_TIMEOUT,
        [f"error: rank 1 on {HOST}/2 gave no sign of life for 6 s: it died or hangs"],
    ),
    "never there": (
        WAIT,
        "",
        EXIT_STARTUP_TIMEOUT,
        ["error: of 2 ranks 1 did not start within 6 s; look at their output, or wait longer"],
    ),
}


def run_pair(folder: Path, works: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on two ranks, which stand for two machines; an empty one is never started."""
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "INIT_TIMEOUT": "6"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        file = folder / f"rank{rank}.py"
        file.write_text(PROGRAM.format(work=works[rank]))
        variables = {**os.environ, **shared, "RANK": str(rank), "GROUP_RANK": str(rank)}
        return run_forked([str(file)], variables, 50)

    with ThreadPoolExecutor() as pool:
        return [*pool.map(run, [rank for rank, work in enumerate(works) if work])]


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure_all_ranks_end_at_once_with_one_line_and_one_exit_code(
    name: str, tmp_path: Path
) -> None:
    *works, code, lines = FAILURES[name]
    start_s = time.monotonic()
    ended = run_pair(tmp_path, tuple(works))
    assert time.monotonic() - start_s < 40
    assert [done.returncode for done in ended if done.returncode != -signal.SIGKILL] == [code] * (
        1 + (name in list(FAILURES)[:4])
    )
    printed = [
        line for done in ended for line in done.stderr.splitlines() if not line.startswith("[W")
    ]
    assert len(printed) == len(lines), printed
    assert all(line.startswith(start) for line, start in zip(printed, lines, strict=True)), printed
