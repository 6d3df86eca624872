"""Two machines made of network namespaces: nothing of one's run is in the other's reach; a lost one
is replaced.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks.jobs import Job
from tests.chaos.machines import (
    NAMES,
    PORT,
    TIMEOUT_S,
    TOTAL_STEPS,
    TwoMachines,
    assert_same_result,
    ip,
    reason_to_skip,
    script,
    starts_of,
    step_of,
    two_machines,
)
from tests.chaos.small_training import NUM_BATCHES
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER

pytestmark = pytest.mark.skipif(
    bool(reason_to_skip()), reason=f"{reason_to_skip()} (run them as root, with iproute2)"
)
LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((sys.argv[1], int(port))) == 0:
            print(port)
"""
LOOP = 'for attempt in 1 2 3 4 5; do "$@" && exit 0; sleep 1; done; exit 1'
CROWD = PROJECT_FOLDER / "recipes" / "crowd_bt"
TRAIN_CROWD = (
    "--backbone",
    "test_resnet",
    "--no-pretrained",
    "--input-size",
    "32",
    "--epochs",
    "1",
    "--device",
    "cpu",
)
MAKE_CROWD = (
    *(
        "--size",
        "32",
        "--num-pictures",
        "42",
        "--num-unseen",
        "14",
        "--comparisons",
        "60",
        "--per-annotator",
        "10",
    ),
)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    with two_machines(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one machine while the other tries to reach all its listening ports; return them and
    the hash.
    """
    with two_machines(tmp_path_factory.mktemp("one")) as machines:
        training = machines.start(0, script(2, machines.folder))
        # To test the scan itself: it must find this port, which is open on purpose.
        opened = machines.start(
            0, [sys.executable, "-m", "http.server", "29999", "--bind", machines.addresses[0]]
        )
        machines.wait_until(lambda: step_of(machines.run) >= NUM_BATCHES, "epoch")
        tables = ip(
            "netns", "exec", machines.namespaces[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"
        ).splitlines()
        rows = [line.split() for line in tables if ":" in line]
        ports = sorted(
            {str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == LISTENING}
        )
        command = [
            "netns",
            "exec",
            machines.namespaces[1],
            sys.executable,
            "-S",
            "-c",
            CONNECT,
            machines.addresses[0],
        ]
        reachable = ip(*command, *ports).split()
        opened.kill()
        machines.finish(training)
        return {
            "ports": ports,
            "reachable": reachable,
            **read_mapping(machines.run / "result.json"),
        }


@pytest.mark.chaos(1, 1, always=True)
def test_s6_no_port_of_a_run_on_one_machine_can_be_reached_from_another(
    one_machine: dict[str, Any],
) -> None:
    assert one_machine["reachable"] == ["29999"], "the port that is open on purpose"
    assert len(one_machine["ports"]) >= 5, "two stores, two of gloo's, ours"


@pytest.mark.chaos(1, 1)
def test_r14_two_machines_undisturbed(
    trial: int, machines: TwoMachines, one_machine: dict[str, Any]
) -> None:
    machines.finish(*[machines.launch(number) for number in (0, 1)])
    assert_same_result(machines.run, one_machine["hash"])


def assert_a_lost_machine_is_replaced(
    machines: TwoMachines, reference: str, launch: Callable[[TwoMachines, int], Job]
) -> float:
    """Kill the second machine's launcher and rank and start it again; return the seconds from then
    to training.
    """
    first, second = (launch(machines, number) for number in (0, 1))
    await_the_middle(machines)
    machines.kill_in_the_middle(second)
    time.sleep(3)
    starts = len(starts_of(machines.run))
    second = launch(machines, 1)
    recovery_s = machines.wait_until(lambda: len(starts_of(machines.run)) > starts, "start")
    machines.finish(first, second)
    assert_same_result(machines.run, reference)
    return recovery_s


def await_the_middle(machines: TwoMachines) -> None:
    machines.wait_until(lambda: step_of(machines.run) >= 2 * NUM_BATCHES, "two epochs")


@pytest.mark.chaos(1, 1, always=True)
def test_r14_a_machine_that_was_lost_is_replaced_and_not_a_bit_differs(
    trial: int, machines: TwoMachines, one_machine: dict[str, Any], record_property: Any
) -> None:
    recovery_s = assert_a_lost_machine_is_replaced(
        machines, one_machine["hash"], TwoMachines.launch
    )
    record_property("from its return to training s", recovery_s)


@pytest.mark.chaos(1, 1)
@pytest.mark.parametrize("launch", [TwoMachines.launch_numbered, TwoMachines.launch_as_kubeflow])
def test_r18_a_machine_is_replaced_with_other_launchers(
    launch: Any,
    trial: int,
    machines: TwoMachines,
    one_machine: dict[str, Any],
    record_property: Any,
) -> None:
    recovery_s = assert_a_lost_machine_is_replaced(machines, one_machine["hash"], launch)
    record_property("from its return to training s", recovery_s)


@pytest.mark.chaos(1, 1)
@pytest.mark.parametrize("is_silent", [False, True], ids=["closed", "unplugged"])
def test_r15_the_first_machine_of_an_elastic_pair_finishes_alone(
    is_silent: bool, trial: int, machines: TwoMachines, record_property: Any
) -> None:
    # Connections of a lost machine are closed, as by a kill or a reboot. Unplugged, only the
    # timeout reveals the loss.
    limit = {"NCCL_TIMEOUT": "10"} if is_silent else {}
    first, second = (
        machines.launch(number, "1:2", NODE_RANK=str(number), **limit) for number in (0, 1)
    )
    await_the_middle(machines)
    if is_silent:
        machines.unplug(1)
    step = machines.kill_in_the_middle(second)
    assert [start["world_size"] for start in starts_of(machines.run)] == [2]
    recovery_s = machines.wait_until(
        lambda: len(starts_of(machines.run)) > 1, "start on one machine"
    )
    record_property("from the loss to training s", recovery_s)
    machines.finish(first)
    last = starts_of(machines.run)[-1]
    assert last["world_size"] == 1
    assert last["step"] >= step
    assert read_mapping(machines.run / "result.json")["step"] == TOTAL_STEPS


@pytest.mark.chaos(1, 1)
def test_r16_the_rendezvous_machine_is_lost_and_a_loop_on_both_starts_again(
    trial: int, machines: TwoMachines, one_machine: dict[str, Any], record_property: Any
) -> None:
    facts = {"NNODES": "2", "MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT}
    loops = [
        machines.start(
            number, ["bash", "-c", LOOP, "loop", *script(1, machines.folder, number)], **facts
        )
        for number in (0, 1)
    ]
    await_the_middle(machines)
    machines.kill_in_the_middle(loops[0], only_descendants=True)
    starts = len(starts_of(machines.run))
    recovery_s = machines.wait_until(lambda: len(starts_of(machines.run)) > starts, "new start")
    record_property("from the loss to training s", recovery_s)
    machines.finish(*loops)
    assert_same_result(machines.run, one_machine["hash"])


@pytest.mark.chaos(1, 1)
def test_r27_the_two_torchrun_lines_of_the_crowd_bt_guide(
    trial: int, machines: TwoMachines
) -> None:
    """Train the quality scorer as the guide says, with one process instead
    of four on each machine.
    """
    photographs, data, run = (machines.folder / name for name in ("photographs", "data", "run"))
    photographs.mkdir()
    for number in range(2):
        tiles = np.random.default_rng(number).integers(0, 255, (24, 24, 3)).astype(np.uint8)
        cv2.imwrite(
            str(photographs / f"{number}.png"), np.kron(tiles, np.ones((8, 8, 1), np.uint8))
        )
    make = [
        sys.executable,
        str(CROWD / "make_data.py"),
        "--images",
        str(photographs),
        "--output",
        str(data),
    ]
    machines.finish(machines.start(0, [*make, *MAKE_CROWD]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=2"]
    meeting = [f"--master_addr={NAMES[0]}", "--master_port=29500"]
    trainer = [str(CROWD / "train.py"), "--distributed", "--world-size", "2", *TRAIN_CROWD]
    places = map(str, ("--data-dir", data, "--image-dir", data / "images", "--checkpoint-dir", run))
    rest = [*meeting, *trainer, *places]
    training = [
        machines.start(number, [*torchrun, f"--node_rank={number}", *rest]) for number in (0, 1)
    ]
    machines.finish(*training, timeout_s=2 * TIMEOUT_S)
    first, second = ((machines.folder / f"log{number}").read_text() for number in (0, 1))
    assert "Distributed training initialized with 2 processes" in first
    assert "Val Loss" in first
    assert "Val Loss" not in second, "rank 0 of the first machine alone must print"
    assert json.loads((run / "evaluation_results.json").read_text())["total"] > 0
