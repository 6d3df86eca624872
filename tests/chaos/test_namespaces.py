"""Two machines made of network namespaces: nothing of one's run is in the other's reach; a lost one is replaced."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest

from chaos import namespaces, report
from chaos.machines import ScenarioFailed, descendants, kill_tree, wait_until

needs_machines = pytest.mark.skipif(
    bool(namespaces.reason_to_skip()), reason=f"{namespaces.reason_to_skip()} (run them as root, with iproute2)"
)


@pytest.fixture(scope="module")
def one_machine() -> dict[str, Any]:
    return namespaces.one_machine_out_of_reach()


@needs_machines
def test_no_port_of_a_run_on_one_machine_can_be_reached_from_another(one_machine: dict[str, Any]) -> None:
    assert one_machine["reachable"] == 0
    assert one_machine["ports"] >= 4


@needs_machines
def test_a_machine_that_was_lost_is_replaced_and_not_a_bit_differs(one_machine: dict[str, Any]) -> None:
    figures = namespaces.lost_and_replaced(one_machine["hash"])  # compares the hashes itself
    assert 0 < figures["seconds from its return to training"] < namespaces.TIMEOUT_S


@needs_machines
def test_nothing_is_left_of_two_machines() -> None:
    with namespaces.two_machines() as machines:
        sleeper = machines.start(0, ["sh", "-c", "sleep 300 & wait"])
        wait_until(lambda: descendants(sleeper.pid), 10, "the shell's child")
        (child,) = descendants(sleeper.pid)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in machines.namespaces)
    assert not machines.folder.exists()
    with pytest.raises(ScenarioFailed, match="not within 0 s: a ghost"):
        wait_until(lambda: os.path.exists(f"/proc/{child}/cwd"), 0.1, "a ghost")


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.reason_to_skip() == "needs root on Linux"
    assert namespaces.run(3) == {
        "id": "R14 R15 R16 R18 S6",
        "what": "two machines (network namespaces): out of reach, lost, replaced, alone",
        "trials": 0,
        "passes": 0,
        "figures": {},
        "skipped": "needs root on Linux",
    }


def test_a_killed_tree_leaves_no_grandchild() -> None:
    shell = subprocess.Popen(["sh", "-c", "sh -c 'sleep 300 & wait' & wait"])
    wait_until(lambda: len(descendants(shell.pid)) == 2, 10, "two generations")
    below = descendants(shell.pid)
    kill_tree(shell)
    deadline_s = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{process}/cwd") for process in below) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{process}/cwd") for process in below)  # a zombie has no folder


def test_a_scenario_that_fails_is_counted_with_its_reason() -> None:
    def fails() -> dict[str, Any]:
        raise ScenarioFailed("the reason")

    found = report.run_trials("R0", "a trial", 2, {"good": lambda: {"seconds": 1}, "bad": fails})
    assert (found["trials"], found["passes"]) == (4, 2)
    assert found["figures"]["bad"][0]["reason"] == "the reason"
    assert found["figures"]["good"][1]["seconds"] == 1
    assert report.print_report(found) == 1
