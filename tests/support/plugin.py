"""Shared by all tests: Ultralytics offline and quiet, the marker for GPU tests, and one small
trained run.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SLOT = os.environ.get("PYTEST_XDIST_WORKER", os.environ.pop("SLOT", "")).removeprefix(
    "gw"
)  # beside others: set by xdist or `make`
if SLOT and hasattr(os, "sched_setaffinity"):
    # A core for each: commands then use one thread. Two threads wait long for each other beside
    # another test.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(SLOT) % len(cores)]})
import torch
from filelock import FileLock

TESTED = os.environ.get("TESTED", "")  # by `make`: the folder whose tests run


class OnlyTested:
    """Lets imports of extras fail, except of the one whose tests run: as if the others were
    deleted.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("yolo_seg_ddp.extras.") and not TESTED.startswith(
            "/".join(name.split(".")[:3])
        ):
            raise ModuleNotFoundError(f"No module named {name!r} beside {TESTED}", name=name)


if TESTED:
    sys.meta_path.insert(0, OnlyTested)  # type: ignore[arg-type]
from tests.support.ranks import run_forked
from yolo_seg_ddp.utils.environment import prepare_environment, user_folder

PROJECT = Path(__file__).resolve().parents[2]
# in PYTHONPATH, it gives Python PRETEND_GPUS GPUs
PRETENCE = PROJECT / "tests" / "support" / "pretended" / "start"
LONGEST_SUITE_S = 30 * 60
prepare_environment()
# Tests with another HOME would compile all loops again.
os.environ.setdefault("NUMBA_CACHE_DIR", str(user_folder("numba")))
os.environ.pop("MLFLOW_TRACKING_URI", None)  # no test may write to the server of who runs it
# What a terminal hands on. A shell's `&` and nohup leave these ignored, and the tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# what `make` prints if pytest ends without a summary
RUNNING_FILE = os.environ.pop("RUNNING_FILE", "")
running: dict[str, None] = {}


# Folders and files, below tests/ unless they are of a recipe or an extra, whose tests start whole
# commands or several real trainings: `make test-quick` leaves them out.
SLOW = (
    *("chaos", "commands", "benchmarks", "security/test_run.py", "security/test_data.py"),
    *("utils/distributed/test_rendezvous.py", "measure/test_machine_checks.py"),
    *(f"recipes/training_engine/tests/test_{name}.py" for name in ("example", "guide")),
    *(f"recipes/crowd_bt/tests/test_{name}.py" for name in ("commands", "training", "s3")),
    "recipes/underwater_ir/tests/test_training.py",
    *(
        f"yolo_seg_ddp/extras/{name}/tests/test_command.py"
        for name in ("mirror", "mlflow", "report")
    ),
    *(f"yolo_seg_ddp/extras/maps/tests/test_{name}.py" for name in ("flights", "positions")),
)
# What these measure or time needs the machine for itself: `make test` runs them one at a time.
ALONE = (
    *(
        "measure",
        "commands/test_profile_gpu.py",
        "commands/test_launcher.py",
        "commands/test_monitor.py",
    ),
    *("benchmarks/test_train_step.py", "benchmarks/test_gpu.py", "chaos/test_slurm.py"),
    *("utils/test_nvml.py", "utils/test_signals.py"),
    *("utils/distributed/test_rendezvous.py", "engine/test_reporting.py", "engine/test_loop.py"),
    *("run/test_status.py", "security/test_data.py", "evaluation/test_native_masks.py"),
    "predict/test_merge_tiles_memory.py",
)
READ_FOR_ALONE = (*ALONE, "data/test_loader.py")  # which marks one of its tests itself


@pytest.hookimpl(tryfirst=True)  # chaos/conftest.py cancels it
def pytest_configure(config: pytest.Config) -> None:
    """Let a suite that hangs say where, even at its very end. pytest captures what goes to the
    usual place.
    """
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        faulthandler.dump_traceback_later(LONGEST_SUITE_S, exit=True, file=os.dup(2))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write which tests run now, also in the workers of pytest-xdist, for the case that this
    process is killed.
    """
    running[nodeid] = None
    if RUNNING_FILE:
        Path(RUNNING_FILE).write_text("".join(f"lost while it ran: {each}\n" for each in running))


def pytest_runtest_logfinish(nodeid: str) -> None:
    running.pop(nodeid, None)


def pytest_sessionfinish() -> None:
    """pytest itself names what failed, also in a worker that was lost."""
    if RUNNING_FILE:
        Path(RUNNING_FILE).unlink(missing_ok=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without such tests unread if tests marked `alone` are asked for: reading all
    takes nine seconds longer.
    """
    is_asked = config.option.markexpr.startswith("alone") and collection_path.name.startswith(
        "test_"
    )
    return True if is_asked and not place_of(collection_path).startswith(READ_FOR_ALONE) else None


def place_of(file: Path) -> str:
    """Return a test file's path below tests/, or below the project if it is an extra's."""
    return file.relative_to(PROJECT).as_posix().removeprefix("tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their place, and skip the `gpu` ones without a GPU."""
    for item in items:
        place = place_of(item.path)
        if place.startswith(SLOW) or "trained" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        if place.startswith(ALONE):
            item.add_marker("alone")
        assert place.startswith(READ_FOR_ALONE) or not item.get_closest_marker("alone"), (
            f"{place}: see READ_FOR_ALONE"
        )
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device (run them on a machine with a GPU)")
            )
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Return when a test's file is handed to a worker of pytest-xdist: the longest first, then the
    rest.

    The second worker's first files need no trained run: both workers would wait for it.
    """
    place = place_of(item.path)
    if place.startswith(("commands/test_pipeline.py", "yolo")):
        return int(place.startswith("yolo"))
    return 2 if "trained" in getattr(item, "fixturenames", ()) else 3


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each reason why tests were skipped: how many, why, how to have them, and
    where they are.
    """
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("skipped", []):
        skipped[report.longrepr[2].removeprefix("Skipped: ")][report.nodeid.partition("::")[0]] += 1
    for reason, files in sorted(skipped.items()):
        places = ", ".join(f"{number} in {file}" for file, number in files.items())
        terminalreporter.write_line(f"{files.total()} skipped: {reason}: {places}")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let each test's own computations use one thread, as its ranks do; two wait for each other
    beside other tests.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class TrainedRun:
    """What the pipeline left: the data set's YAML, the run folder, and what the trainer printed."""

    raw: Path
    processed: Path
    data: Path
    folder: Path
    output: str


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(num_processes: int) -> tuple[str, ...]:
    ports = (f"--nproc_per_node={num_processes}", f"--master_port={free_port()}")
    return ("python", "-m", "torch.distributed.run", *ports)


def run_script(
    *arguments: str | Path, timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one of the project's commands from its folder; `python` is this interpreter. The command
    sees no GPU.

    Many tests start two processes, which a machine with one GPU would refuse; a `gpu` test passes
    CUDA_VISIBLE_DEVICES.
    """
    words = [str(argument) for argument in arguments]
    variables = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    if (
        words[0] == "python"
        and (words[1] == "-m" or words[1].endswith(".py"))
        and "PYTHONPATH" not in environment
    ):
        return run_forked(words[1:], variables, timeout_s)
    return subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        cwd=PROJECT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Call a script's `main` in this process, as if from its command line; return the exit code."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    return int(module.main())


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def must_run(*arguments: str | Path, timeout_s: float = 240, **environment: str) -> str:
    done = run_script(*arguments, timeout_s=timeout_s, **environment)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


TRAIN_FLAGS = (
    *(
        "--model",
        "yolov8n-seg.yaml",
        "--img-size",
        "96",
        "--batch-size",
        "4",
        "--lr",
        "0.002",
        "--optimizer",
        "adamw",
    ),
    # mosaic to the end: the losses of epochs with and without it do not compare
    *("--close-mosaic", "0"),
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Run sample, parse and a 2-rank training of two epochs once for all tests that look at their
    results.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent / "pipeline" if "PYTEST_XDIST_WORKER" in os.environ else root / "pipeline"
    root.mkdir(exist_ok=True)
    raw, processed, folder = root / "raw", root / "processed", root / "run"
    data = processed / "dataset.yaml"
    printed = root / "printed.txt"
    with FileLock(root / ".lock"):  # the workers of pytest-xdist share it
        if not printed.exists():
            must_run("python", "download_data.py", "--sample", "36", "--output", raw)
            sizes = ("--long-side", "320", "--line-width", "14")
            must_run("python", "parse_labels.py", "--input", raw, "--output", processed, *sizes)
            (processed / "train/ignore").mkdir()
            # the first object's outline is rough
            for file in list((processed / "train/labels").iterdir())[:9]:
                rough = file.read_text().partition("\n")[0]
                (processed / "train/ignore" / file.name).write_text(
                    f"{rough}\n-1 0.5 0.5 0.4 0.4\n"
                )
            extra = (
                "--",
                "--data",
                str(data),
                "--save-dir",
                str(folder),
                *TRAIN_FLAGS[:2],
                *TRAIN_FLAGS[6:],
            )
            printed.write_text(must_run("bash", "train_ddp.sh", "2", "4", "2", "96", *extra))
    return TrainedRun(raw, processed, data, folder, printed.read_text())
