"""utils/distributed/rank_processes.py: what ranks find in their environment, and what comes back from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.distributed.rank_processes import run_ranks


def test_ranks_find_job_place_and_the_user_s_modules_and_answer_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").write_text(
        "import os\n"
        "from utils.distributed.rank_processes import read_job, write_answer\n"
        "def answer():\n"
        "    write_answer([read_job()['number'], os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE']])\n"
    )
    earlier = str(tmp_path / "absent")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([earlier, str(tmp_path)]))
    code = "from of_the_user import answer; run_script(answer)"
    assert run_ranks(code, 2, {"number": 5}, timeout_s=60) == [[5, "0", "2"], [5, "1", "2"]]


def test_a_rank_without_an_answer_gives_none() -> None:
    assert run_ranks("run_script(lambda: 0)", 1, {}, timeout_s=60) == [None]
