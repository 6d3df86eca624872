"""Signals of the launcher, and the threads of processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.plugin import PROJECT, run_script
from tests.support.processes import is_running, wait_until
from yolo_seg_ddp.utils import signals
from yolo_seg_ddp.utils.threads import MAX_WAITING_PER_THREAD, ordered_map


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


@pytest.mark.skipif(
    not hasattr(signal, "SIGHUP"), reason="no terminals that hang up (run them on Linux or macOS)"
)
def test_a_training_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_forwarded_ctrl_c_counts_once_but_a_second_one_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with signals.StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        # the terminal and the launcher both deliver the same key press
        os.kill(os.getpid(), signal.SIGINT)
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
    thread.join(timeout=120)
    assert seen == [False, before]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
child.wait()
"""
CHILD = """
import time
from yolo_seg_ddp.utils.signals import die_with_parent
print(die_with_parent(only_under_torchrun=False), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl (run them on Linux)")
def test_killed_launcher_leaves_no_rank_behind() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_id, arranged = parent.stdout.readline().split()
        assert arranged == "True"
        assert is_running(int(child_id))
        parent.kill()
    wait_until(lambda: not is_running(int(child_id)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl (run them on Linux)")
def test_a_rank_ends_when_its_parent_was_gone_before_the_tie() -> None:
    code = (
        "import sys; from yolo_seg_ddp.utils.signals import die_with_parent; "
        "print(die_with_parent(int(sys.argv[1])), flush=True)"
    )
    for parent_id, returncode, said in (
        (os.getpid(), 0, "True\n"),
        (os.getppid(), -signal.SIGKILL, ""),
    ):
        ended = run_script("python", "-c", code, str(parent_id), TORCHELASTIC_RUN_ID="test")
        assert (ended.returncode, ended.stdout) == (returncode, said)


def test_plain_python_outlives_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert signals.die_with_parent() is False


def test_results_come_in_order_whoever_is_first() -> None:
    def slow_for_some(number: int) -> int:
        time.sleep(0.01 * (number % 3 == 0))
        return number * number

    assert list(ordered_map(slow_for_some, range(40), threads=4)) == [
        number * number for number in range(40)
    ]
    assert list(ordered_map(slow_for_some, [], threads=2)) == []


def test_few_results_wait_for_a_slow_user() -> None:
    done: list[int] = []
    results = ordered_map(done.append, range(100), threads=1)
    next(results)
    time.sleep(0.2)
    assert len(done) <= MAX_WAITING_PER_THREAD + 1
    assert len(list(results)) == 99
    assert done == list(range(100))


def test_an_error_is_raised_at_its_item() -> None:
    results = ordered_map(lambda number: 1 / (number - 2), range(5), threads=2)
    assert [next(results), next(results)] == [-0.5, -1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_user_who_leaves_early_leaves_no_work_behind() -> None:
    done: list[int] = []
    results = ordered_map(done.append, range(1000), threads=1)
    next(results)
    results.close()  # type: ignore[attr-defined]
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count < 20
