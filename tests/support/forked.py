"""Runs the project's Python commands in processes forked from a server that has imported PyTorch: three seconds less for each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.ranks import PRELOADED

PROJECT = Path(__file__).resolve().parents[2]


def run_forked(
    words: list[str], environment: dict[str, str], timeout_s: float, prelude: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the words of a command after `python`, which is a file or `-m module`, from the project's folder.

    Like a new interpreter's, but for variables that PyTorch reads when it is imported. `prelude` is Python code that the
    process runs before. Raises subprocess.TimeoutExpired.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, "stdout"), Path(name, "stderr")]
        process = context.Process(target=_be_the_command, args=(words, environment, files, prelude))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout_s)
        printed, errors = (file.read_text() if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(words, process.exitcode, printed, errors)


def _be_the_command(words: list[str], environment: dict[str, str], files: list[Path], prelude: str) -> None:
    os.chdir(PROJECT)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path[:0] = [str(PROJECT if is_module else Path(words[0]).resolve().parent), str(PROJECT)]
    exec(prelude, {})  # noqa: S102 # the test's own code
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
