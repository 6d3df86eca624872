"""Tests of utils/devices.py: cores, devices, precision, seeds, signals, environment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from tests.conftest import PROJECT
from utils.common import cores, devices, environment, signals
from utils.common.errors import UserError


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 16),
        ({"cpu.max": "max 100000"}, "0::/\n", 16),
        ({"cpu.max": "250000 100000"}, "0::/\n", 3),
        ({"cpu.max": "1000 100000"}, "0::/\n", 1),
        ({"cpu.max": "6400000 100000"}, "0::/\n", 16),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, "0::/job/step\n", 4),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "3:memory:/x\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", 16),
        ({"cpu/box/cpu.cfs_quota_us": "500000", "cpu/box/cpu.cfs_period_us": "100000"}, "1:cpu:/box\n", 5),
        ({"cpu.max": "nonsense"}, "garbage", 16),
    ],
)
def test_container_quota_limits_the_cores(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int
) -> None:
    membership_file = tmp_path / "membership"
    membership_file.write_text(membership)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    assert cores.usable_cpu_count(tmp_path / "cgroup", membership_file) == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("requested", [0, 1, 8])
def test_threads_and_workers_never_oversubscribe_the_cores(device_type: str, requested: int) -> None:
    for num_cores in range(1, 65):
        for ranks in range(1, 9):
            threads, workers = cores.choose_threads_and_workers(ranks, requested, device_type, num_cores)
            assert threads >= 1
            assert 0 <= workers <= requested
            if num_cores // ranks >= 2:
                assert ranks * (threads + workers) <= num_cores
            elif device_type == "cpu":
                assert (threads, workers) == (1, 0)
            else:
                assert workers == min(1, requested)


def test_gpu_ranks_load_with_all_but_one_of_their_cores() -> None:
    assert cores.choose_threads_and_workers(4, 8, "cuda", cores=16) == (1, 3)
    assert cores.choose_threads_and_workers(2, 8, "cuda", cores=32) == (8, 8)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_gets_its_own_gpu() -> None:
    assert devices.choose_device("auto", 1) == torch.device("cuda", 1)
    assert devices.choose_device("cuda", 0) == torch.device("cuda", 0)
    assert devices.choose_device("cuda:1", 0) == torch.device("cuda", 1)
    assert devices.choose_device("1", 0) == torch.device("cuda", 1)
    assert devices.choose_device("cpu", 5) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_every_rank_refuses_when_ranks_outnumber_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for local_rank in range(4):  # also the ranks that have a GPU: they would wait for the others for ever
        with pytest.raises(UserError, match=r"4 processes but 2 visible GPU\(s\).*train_ddp.sh 2"):
            devices.choose_device("auto", local_rank)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("requested", "ranks", "message"),
    [("cuda:2", "1", "numbered from 0"), ("gpu", "1", "not one of"), ("cuda:0", "2", "names one GPU for 2 processes")],
)
def test_wrong_device_is_named(monkeypatch: pytest.MonkeyPatch, requested: str, ranks: str, message: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(UserError, match=message):
        devices.choose_device(requested, 0)


def test_without_cuda_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(UserError, match="--device cpu"):
        devices.choose_device("cuda", 0)


@pytest.mark.parametrize(
    ("requested", "device", "has_bf16", "expected"),
    [
        ("auto", "cpu", True, ("bf16", torch.bfloat16, False)),
        ("auto", "cpu", False, ("off", None, False)),
        ("bf16", "cpu", False, ("bf16", torch.bfloat16, False)),
        ("auto", "cuda", True, ("bf16", torch.bfloat16, False)),
        ("auto", "cuda", False, ("fp16", torch.float16, True)),
        ("off", "cuda", True, ("off", None, False)),
    ],
)
def test_precision_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, requested: str, device: str, has_bf16: bool, expected: tuple[str, object, bool]
) -> None:
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert devices.choose_precision(requested, torch.device(device)) == devices.Precision(*expected)


@pytest.mark.parametrize(("requested", "device"), [("fp16", "cpu"), ("bf16", "cuda"), ("half", "cpu")])
def test_impossible_precision_is_refused(monkeypatch: pytest.MonkeyPatch, requested: str, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match=f"--amp {requested}"):
        devices.choose_precision(requested, torch.device(device))


def _draw(seed: int, rank: int) -> tuple[float, float, float]:
    devices.seed_everything(seed, rank)
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_seeding_repeats_and_differs_between_ranks() -> None:
    assert _draw(3, 0) == _draw(3, 0)
    assert all(mine != other for mine, other in zip(_draw(3, 0), _draw(3, 1), strict=True))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_only_sets_the_flag_and_old_handlers_return(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with signals.StopFlag() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal changes nothing
        assert stop.is_set
        assert stop.reason == name
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no terminals that hang up")
def test_a_training_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_forwarded_ctrl_c_counts_once_but_a_second_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    with signals.StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the terminal and the launcher both deliver the same key press
        assert stop.reason == "SIGINT"
        monkeypatch.setattr(signals, "_SAME_KEY_PRESS_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_to_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:  # as Ray Train runs a training
        with signals.StopFlag() as stop:
            seen.extend([stop.is_set, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=10)
    assert seen == [False, before]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
child.wait()
"""
CHILD = """
import time
from utils.common.signals import die_with_parent
print(die_with_parent(only_under_torchrun=False), flush=True)
time.sleep(60)
"""


def _is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_killed_launcher_leaves_no_rank_behind() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_id, arranged = parent.stdout.readline().split()
        assert arranged == "True"
        assert _is_running(int(child_id))
        parent.kill()
    deadline_s = time.monotonic() + 10
    while _is_running(int(child_id)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _is_running(int(child_id))


def test_plain_python_outlives_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert signals.die_with_parent() is False


def test_environment_is_prepared_without_overriding_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "svg")
    for name in ("YOLO_OFFLINE", "YOLO_AUTOINSTALL", "ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS", "YOLO_CONFIG_DIR"):
        monkeypatch.setenv(name, "to be removed again after the test")
        monkeypatch.delenv(name)
    environment.prepare_environment()
    assert os.environ["YOLO_OFFLINE"] == "1"
    assert os.environ["YOLO_AUTOINSTALL"] == "0"
    assert os.environ["ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS"] == "1"
    assert os.environ["MPLBACKEND"] == "svg"
    assert Path(os.environ["YOLO_CONFIG_DIR"]) == tmp_path / ".cache" / "yolo-seg-ddp" / "ultralytics"
    assert Path(os.environ["YOLO_CONFIG_DIR"]).is_dir()


def test_settings_go_to_the_temporary_folder_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = environment._settings_folder()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)


def test_torch_is_imported_before_ultralytics_can_limit_its_threads() -> None:
    code = (
        "import sys, utils.common.environment as r; early = 'torch' in sys.modules; r.prepare_environment(); "
        "print(early, 'torch' in sys.modules, 'ultralytics' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "True", "False"]


def test_memory_is_reported_in_bytes(tmp_path: Path) -> None:
    before = devices.peak_memory_bytes(torch.device("cpu"))
    assert before > 50 * 2**20  # PyTorch alone is larger
    free = cores.shared_memory_free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    assert cores.shared_memory_free_bytes(tmp_path / "missing") is None


def test_environment_report_names_versions_but_no_host() -> None:
    report = environment.environment_report()
    assert report["torch"] == torch.__version__
    assert int(report["usable_cores"]) >= 1
    assert {"python", "torchvision", "ultralytics", "cuda", "cudnn", "nccl", "gpus", "cpu", "git_revision"} <= set(
        report
    )
    assert all(isinstance(value, str) and value for value in report.values())
    assert not {"host", "hostname", "user"} & set(report)


def test_git_revision_tells_changes_and_tolerates_absence(tmp_path: Path) -> None:
    assert environment.git_revision(tmp_path) == "unknown"
    (tmp_path / "file").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, timeout=20)
    clean = environment.git_revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert environment.git_revision(tmp_path) == clean + "+changes"
