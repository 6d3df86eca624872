"""`make gpu`: which parts run when, what is kept, the table, the folder of results, what parts
check.
"""

import gzip
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import plan, runner, trainings, wheels
from benchmarks.gpu.parts import PARTS, outcome_of, with_needed
from benchmarks.gpu.plan import Finding, NeedsGpu, Outcome, Part, PartFailed, Setting
from benchmarks.gpu.report import table, verdict, write_results
from benchmarks.gpu.runner import Runner, Store, run_parts
from benchmarks.jobs import Job, TooSlow, is_alive
from tests.support.plugin import PROJECT, read_json
from tests.support.processes import wait_until
from tests.support.recipes import run_command
from yolo_seg_ddp.run.checkpoint import save_checkpoint
from yolo_seg_ddp.utils.errors import UserError

SETTING = Setting("cpu", 0, Path("work"))


def part(
    name: str, *, alone: bool = False, after: tuple[str, ...] = (), needed_s: float = 1.0
) -> Part:
    return Part(
        name, f"what {name} shows", lambda setting: Finding("fine"), 10, needed_s, alone, after
    )


# --- which parts run when -------------------------------------------------------------------------


class Stage(Runner):
    """Runs made-up parts, each of which lasts a moment, and notes what ran beside what."""

    def __init__(self, statuses: dict[str, str] | None = None) -> None:
        super().__init__(SETTING, Path("logs"))
        self.statuses = statuses or {}
        self.now: set[str] = set()
        self.begun: list[str] = []
        self.beside: dict[str, int] = {}
        self.used_s = 0.0

    def run(self, part: Part, left_s: float) -> Outcome:
        self.begun.append(part.name)
        self.now.add(part.name)
        time.sleep(0.05)
        for name in self.now:
            self.beside[name] = max(self.beside.get(name, 0), len(self.now))
        time.sleep(0.05)
        self.now.remove(part.name)
        self.used_s += part.needed_s
        return Outcome(self.statuses.get(part.name, plan.OK), 1.0)

    def run_all(self, *parts: Part, total_s: float = 100.0, **kept: Outcome) -> dict[str, Outcome]:
        return run_parts(
            parts, kept, self, lambda: total_s - self.used_s, 2, lambda part, outcome: None
        )


def test_parts_that_measure_run_alone_and_the_others_side_by_side() -> None:
    stage = Stage()
    outcomes = stage.run_all(
        *map(part, "abc"), part("d", alone=True), part("e", alone=True), part("f")
    )
    assert stage.begun[2:] == list("cdef")
    assert {name: stage.beside[name] for name in "abdef"} == {
        "a": 2,
        "b": 2,
        "d": 1,
        "e": 1,
        "f": 1,
    }
    assert {outcome.status for outcome in outcomes.values()} == {plan.OK}


def test_a_part_waits_for_those_it_needs_while_others_go_ahead() -> None:
    stage = Stage()
    outcomes = stage.run_all(*map(part, "xac"), part("b", after=("c",)))
    assert stage.begun[-1] == "b"
    assert stage.beside["b"] == 1
    assert list(outcomes) == ["x", "a", "c", "b"]  # the table keeps its order


def test_what_no_longer_fits_is_not_begun_and_what_fits_is() -> None:
    stage = Stage()
    parts = (
        part("a", needed_s=6),
        part("b", needed_s=6, alone=True),
        part("c", needed_s=3, alone=True),
    )
    outcomes = stage.run_all(*parts, total_s=10)
    assert stage.begun == ["a", "c"]
    assert outcomes["b"].status == plan.NO_TIME


def test_an_interrupt_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RUN_PART", ["-c", "import time; time.sleep(60)"])
    jobs: set[Job] = set()
    ended: list[str] = []

    class Interrupted(Runner):
        def run(self, part: Part, left_s: float) -> Outcome:
            if part.name == "a":
                return super().run(part, left_s)
            wait_until(lambda: self._running)
            jobs.update(self._running)
            raise KeyboardInterrupt

    parts, interrupted = [part("b"), part("a"), part("c")], Interrupted(SETTING, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_parts(
            parts, {}, interrupted, lambda: 100.0, 2, lambda part, outcome: ended.append(part.name)
        )
    assert jobs
    assert not any(is_alive(job.process) for job in jobs)
    assert ended == []


def test_only_good_ends_with_the_same_code_are_kept(tmp_path: Path) -> None:
    store, one = Store(tmp_path / "state", "key"), part("a")
    assert store.finished(one) is None
    for status, is_kept in (
        (plan.OK, True),
        (plan.NEEDS_GPU, True),
        (plan.FAILED, False),
        (plan.NO_TIME, False),
    ):
        store.keep(one, Outcome(status, 2.0, "said", {"x": [1]}))
        expected = Outcome(status, 2.0, "said", {"x": [1]}, is_kept=True) if is_kept else None
        assert store.finished(one) == expected
    store.keep(one, Outcome(plan.OK))
    assert Store(tmp_path / "state", "other").finished(one) is None
    store.forget(one)
    assert store.finished(one) is None


# --- the table of parts ---------------------------------------------------------------------------


def test_the_table_has_its_order_and_chosen_parts_bring_those_they_need() -> None:
    names = [part.name for part in PARTS]
    assert names[0] == "same_as_cpu"
    assert [part.alone for part in PARTS] == sorted(part.alone for part in PARTS), (
        "proofs run side by side, before all that measures"
    )
    assert len(set(names)) == len(names)
    for number, one in enumerate(PARTS):
        assert set(one.after) <= set(names[:number]), one.name
        assert one.needed_s <= one.limit_s
    assert [one.name for one in with_needed(["inference", "nccl"])] == [
        "data",
        "nccl",
        "precision_musgd",
        "inference",
    ]


# --- how a part ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, plan.OK, "fine"),
        (PartFailed("not equal", gap=3), plan.FAILED, "not equal"),
        (NeedsGpu("for fp16"), plan.NEEDS_GPU, "for fp16"),
        (UserError("no such file"), plan.FAILED, "no such file"),
        (TooSlow("no checkpoint"), plan.FAILED, "no checkpoint"),
        (ZeroDivisionError("by zero"), plan.FAILED, "ZeroDivisionError: by zero"),
    ],
)
def test_every_end_of_a_part_is_a_row_of_the_table(
    error: Exception | None, status: str, said: str
) -> None:
    def run(setting: Setting) -> Finding:
        if error is not None:
            raise error
        return Finding("fine", {"speed": 1.0})

    outcome = outcome_of(Part("a", "", run, 1, 1), SETTING)
    assert (outcome.status, outcome.said) == (status, said)
    assert outcome.figures == {"fine": {"speed": 1.0}, "not equal": {"gap": 3}}.get(said, {})


def test_a_part_runs_in_its_own_process_and_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Runner(SETTING, tmp_path)
    late = "import time; print('slow', flush=True); time.sleep(60)"
    good = 'import sys, pathlib; pathlib.Path(sys.argv[3]).write_text(\'{"status": "ok"}\')'
    bad = "print('no such driver'); raise SystemExit(3)"
    for name, program, left_s, status, said in (
        ("late", late, 1.0, plan.TOO_SLOW, "not done after 1 s; slow"),
        ("good", good, 60.0, plan.OK, ""),
        ("bad", bad, 60.0, plan.FAILED, "ended with code 3; no such driver"),
    ):
        monkeypatch.setattr(runner, "RUN_PART", ["-c", program])
        outcome = made.run(part(name), left_s)
        assert (outcome.status, outcome.said) == (status, said)
        assert 0 < outcome.seconds < 50


def test_a_process_writes_how_its_part_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, answer = tmp_path / "setting.json", tmp_path / "answer.json"
    setting.write_text(json.dumps({"device": "cpu", "num_gpus": 0, "folder": str(tmp_path)}))
    monkeypatch.setattr(gpu_parts, "die_with_parent", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["parts", "out_of_memory", str(setting), str(answer)])
    gpu_parts.main()
    found = read_json(answer)
    assert (found["status"], found["said"]) == (plan.NEEDS_GPU, "a batch that no GPU holds")


# --- the table and the file -----------------------------------------------------------------------


def test_table_and_file_hold_every_part_whatever_its_end(tmp_path: Path) -> None:
    parts = [part("good"), part("bad"), part("late")]
    inside = str(PROJECT / "outputs" / "x")
    outcomes = {
        "good": Outcome(plan.OK, 3.4, "all equal", {"folder": inside, "speed": 12.5}, is_kept=True),
        "bad": Outcome(plan.FAILED, 1.0, "word " * 40),
        "late": Outcome(plan.NO_TIME, said="needs about 60 s"),
    }
    lines = table(parts, outcomes).splitlines()
    assert lines[2].split() == ["good", "ok", "3", "kept", "all", "equal"]
    assert lines[3].startswith("bad")
    assert lines[4].startswith(" ")  # a long text continues below
    assert lines[-1].split() == ["late", "no", "time", "left", "needs", "about", "60", "s"]
    assert verdict(outcomes) == "3 parts: 1 ok, 1 FAILED, 1 no time left"
    root, folder = tmp_path / "gpu", tmp_path / "deep" / "results"
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "bad.log").write_text("no such driver")
    (root / "work" / "operators").mkdir(parents=True)
    (root / "work" / "operators" / "trace.json").write_text("{}")
    write_results(folder, root, {"driver": "580.1"}, "make gpu", parts, outcomes)
    content = read_json(folder / "results.json")
    assert content["environment"] == {"driver": "580.1"}
    assert content["parts"]["good"]["figures"] == {"folder": "outputs/x", "speed": 12.5}
    assert [found["status"] for found in content["parts"].values()] == [
        plan.OK,
        plan.FAILED,
        plan.NO_TIME,
    ]
    assert "all equal" in (folder / "report.txt").read_text()
    with tarfile.open(folder / "logs.tar.gz") as logs:
        assert logs.getnames() == ["logs/bad.log"]
    assert gzip.decompress((folder / "trace.json.gz").read_bytes()) == b"{}"
    assert len(list(folder.iterdir())) == 4


def test_a_failed_part_fails_the_command_after_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage({"bad": plan.FAILED})
    parts = (part("data", alone=True), part("bad", alone=True))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "Runner", lambda setting, logs: stage)
    monkeypatch.setattr(
        command, "write_results", lambda *arguments: written.append(dict(arguments[-1]))
    )
    written: list[dict[str, Outcome]] = []
    run = partial(run_command, command, "--device", "cpu", "--output", tmp_path)
    assert run() == 1
    # after each part
    assert [list(outcomes) for outcomes in written[:2]] == [["data"], ["data", "bad"]]
    stage.statuses.clear()
    assert run() == 0
    assert stage.begun == ["data", "bad", "bad"]  # what is finished does not run again
    assert "2 parts: 2 ok" in capsys.readouterr().out
    assert run("--again") == 0
    assert stage.begun[3:] == ["data", "bad"]
    assert run("--again", "--only", "bad") == 0
    assert list(written[-1]) == ["data", "bad"]  # the other part's figures stay


def test_without_a_gpu_the_dry_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="PyTorch sees no GPU; DEVICE=cpu make gpu is a dry run"):
        run_command(command)


def test_make_gpu_with_a_given_python_installs_nothing() -> None:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DEVICE", "ARGS", "MAKEFLAGS")
    }
    command = ["make", "--dry-run", "--no-print-directory", "gpu"]
    for settings, expected in (
        ({}, "--device auto"),
        ({"DEVICE": "cpu", "ARGS": "--again"}, "--device cpu --again"),
    ):
        environment = {**inherited, "PYTHON": "python3", **settings}
        shown = subprocess.check_output(command, cwd=PROJECT, env=environment, text=True)
        assert " ".join(shown.split()) == f"python3 -m benchmarks.gpu {expected}"


# --- packages -------------------------------------------------------------------------------------


def test_wheels_are_unpacked_once_and_added_to_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    with zipfile.ZipFile(folder / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought/__init__.py", "")
    assert wheels.unpack(folder, site) == ["brought-1.0-py3-none-any.whl"]
    (site / "brought" / "__init__.py").write_text("# changed")
    wheels.unpack(folder, site)
    assert (site / "brought" / "__init__.py").read_text() == "# changed"
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("WHEELS", str(folder))
    wheels.start_again_with(site, "benchmarks.gpu", ["--again"])
    ((python, arguments, environment),) = started
    assert python == sys.executable
    assert arguments[1:] == ["-m", "benchmarks.gpu", "--again"]
    assert environment["PYTHONPATH"].split(os.pathsep) == ["/of/the/user", str(site)]
    assert "WHEELS" not in environment


def test_a_package_for_another_python_is_named_although_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_another_python.py").write_text(
        "raise ImportError('undefined symbol: _PyLong_New')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(wheels, "NEEDED", ("torch", "no_such_module", "of_another_python"))
    missing = wheels.missing_modules()
    assert [line.split()[0] for line in missing] == ["no_such_module", "of_another_python"]
    assert "undefined symbol" in missing[1]


# --- what parts check -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "weight", "skips", "problem"),
    [
        (4.0, 1.0, {}, None),
        (4.0, 1.0, {4: 3}, None),
        (4.0, 1.0, {4: 30}, "30 steps were skipped"),
        (4.0, 1.0, {4: 2, 15: 3}, "3 steps were skipped, the last ones before step 15"),
        (4.5, 1.0, {}, "is not within"),
        (float("nan"), 1.0, {}, "is not within"),
        (4.0, float("inf"), {}, "not finite"),
    ],
)
def test_a_sick_training_is_noticed(
    tmp_path: Path, loss: float, weight: float, skips: dict[int, int], problem: str | None
) -> None:
    tensors = {"w": torch.tensor([1.0, weight])}
    state: dict[str, Any] = {"model": tensors, "ema": None, "optimizer": {"state": {0: tensors}}}
    save_checkpoint(tmp_path / "checkpoint", 20, {**state, "scaler": {"scale": 4.0}})
    records: list[dict[str, Any]] = [
        {"kind": "skip", "global_step": step, "skipped": number} for step, number in skips.items()
    ]
    records += [
        {"kind": "epoch", "epoch": step // 10, "global_step": step, "train_loss": loss}
        for step in (10, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    found = trainings.health(tmp_path, 4.0, 0.05)["problems"]
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
