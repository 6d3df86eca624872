"""How a script leaves: its code, its last words, and no teardown where other ranks' threads could meet it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from utils.common.environment import python_path
from utils.common.errors import UserError, explain_out_of_memory

SCRIPT = """
import atexit, sys
from utils.common.errors import UserError, run_script

class Witness:
    def __del__(self):
        print("torn down", flush=True)

witness = Witness()
atexit.register(print, "cleaned up")

def main():
    print("unflushed", end=" ")
    if sys.argv[1:] == ["a bug"]:
        raise RuntimeError("a bug")
    if sys.argv[1:] == ["a closed file"]:
        raise PermissionError(13, "Permission denied", "photo.jpg")
    if sys.argv[1:] == ["a file as folder"]:
        raise FileExistsError(17, "File exists", "results")
    if len(sys.argv) > 1:
        raise UserError(sys.argv[1])
    return 75

run_script(main)
"""


def _leave(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    place = {**kept, "PYTHONPATH": python_path(), **environment}
    return subprocess.run(command, env=place, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "rank", "code", "said", "complaint"),
    [
        ((), "0", 75, "unflushed cleaned up\n", ""),
        ((), None, 75, "unflushed cleaned up\ntorn down\n", ""),
        (("no such file",), "0", 1, "unflushed cleaned up\n", "error: no such file"),
        (("no such file",), "1", 1, "unflushed cleaned up\n", "[rank 1] error: no such file"),
        (
            ("a closed file",),
            "0",
            1,
            "unflushed cleaned up\n",
            "error: photo.jpg: Permission denied; give the user who runs this access to it and to its folder",
        ),
        (("a file as folder",), "0", 1, "unflushed cleaned up\n", "error: results: File exists; name another place"),
    ],
)
def test_a_script_leaves_with_its_code_and_one_line_and_a_rank_without_the_interpreters_teardown(
    words: tuple[str, ...], rank: str | None, code: int, said: str, complaint: str
) -> None:
    done = _leave(*words, **({"RANK": rank} if rank else {}))
    assert (done.returncode, done.stdout, done.stderr.rstrip("\n")) == (code, said, complaint)


def test_a_bug_in_a_rank_keeps_its_traceback_and_waits_for_nobody() -> None:
    done = _leave("a bug", RANK="1")
    assert (done.returncode, done.stdout) == (1, "unflushed cleaned up\n")
    assert "Traceback" in done.stderr
    assert done.stderr.strip().endswith("RuntimeError: a bug")


@pytest.mark.parametrize(
    "words", ["CUDA error: out of memory", "GET was unable to find an engine to execute this computation"]
)
def test_used_up_memory_is_explained_whoever_notices_it(words: str) -> None:
    with pytest.raises(UserError, match="use a smaller batch"), explain_out_of_memory("use a smaller batch"):
        raise RuntimeError(words)


@pytest.mark.parametrize("error", [RuntimeError("illegal memory access"), ValueError("out of memory")])
def test_other_errors_are_not_explained_by_memory(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), explain_out_of_memory("use a smaller batch"):
        raise error
