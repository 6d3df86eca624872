"""Two virtual machines: network namespaces with a cable between them, each with its own hostname. Needs root on Linux.

python -m chaos.namespaces [TRIALS]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.machines import (
    PROJECT,
    TRAINER,
    ScenarioFailed,
    clean_environment,
    kill_tree,
    require,
    result_of,
    starts_of,
    step_of,
    wait_until,
)
from chaos.report import Trial, print_report, run_trials
from chaos.small_training import NUM_BATCHES

NAMES = ("node0", "node1")
PORT = "29400"
TOTAL_STEPS = 8 * NUM_BATCHES
TIMEOUT_S = 150.0
LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((sys.argv[1], int(port))) == 0:
            print(port)
"""


def reason_to_skip() -> str:
    """Return why two machines cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = f"probe-{os.getpid()}"
    for verb in ("add", "del"):
        done = subprocess.run(["ip", "netns", verb, probe], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"ip netns {verb}: {' '.join(done.stderr.split())[:100]}"
    return ""


@dataclass
class TwoMachines:
    """Both machines, their shared folder and their running processes; see `two_machines`."""

    folder: Path
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    cables: tuple[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, machine: int, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine and return its process. Its output goes to `log<machine>`."""
        on_machine = ["ip", "netns", "exec", self.namespaces[machine], "unshare", "--uts", "--", "sh", "-c"]
        become = ['hostname "$0"; exec "$@"', NAMES[machine]]
        with (self.folder / f"log{machine}").open("ab") as log:
            process = subprocess.Popen(
                [*on_machine, *become, *command], env=clean_environment(**environment), stdout=log, stderr=log
            )
        self.running.append(process)
        return process

    def launch(self, machine: int, nodes: str = "2", **environment: str) -> subprocess.Popen[bytes]:
        """Start train_ddp.sh with one process on one of the two machines."""
        facts = {"NNODES": nodes, "MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT, **environment}
        return self.start(machine, self.script("1", machine), **facts)

    def launch_numbered(self, machine: int) -> subprocess.Popen[bytes]:
        """Start train_ddp.sh with NODE_RANK, which selects the static rendezvous."""
        return self.launch(machine, NODE_RANK=str(machine))

    def launch_as_kubeflow(self, machine: int) -> subprocess.Popen[bytes]:
        """Start plain torchrun as Kubeflow Trainer does, configured by environment variables only."""
        facts = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(machine),
            "PET_MASTER_ADDR": NAMES[0],
            "PET_MASTER_PORT": PORT,
            "PET_MAX_RESTARTS": "3",
            "PET_LOG_DIR": str(self.folder / f"ranks{machine}"),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        return self.start(machine, [*torchrun, str(TRAINER), "--save-dir", str(self.run)], **facts)

    def script(self, processes: str, machine: int) -> list[str]:
        """Return the command line of train_ddp.sh."""
        options = ["--max-restarts", "3", "--log-dir", str(self.folder / f"ranks{machine}")]
        return ["bash", str(PROJECT / "train_ddp.sh"), processes, *options, "--", "--save-dir", str(self.run)]

    @property
    def run(self) -> Path:
        """The run folder, which both machines see."""
        return self.folder / "run"

    def unplug(self, machine: int) -> None:
        """Take a machine off the network, so that its connections end without notice."""
        _ip("-n", self.namespaces[machine], "link", "set", self.cables[machine], "down")

    def finish(self, process: subprocess.Popen[bytes], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a process ends. Raises ScenarioFailed unless its exit code is 0."""
        wait_until(lambda: process.poll() is not None, timeout_s, "the end of the training")
        require(process.returncode == 0, f"exit code {process.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        """Return the ends of both machines' logs."""
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in sorted(self.folder.glob("log[01]")))


Launch = Callable[[TwoMachines, int], "subprocess.Popen[bytes]"]


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Make two namespaces with a cable between them; at the end remove them and kill all their processes."""
    mark = os.getpid()
    names = (f"chaos{mark}a", f"chaos{mark}b")
    cables = (f"cha{mark}"[:15], f"chb{mark}"[:15])
    subnet = f"10.77.{mark % 250}"
    addresses = (f"{subnet}.1", f"{subnet}.2")
    machines = TwoMachines(Path(tempfile.mkdtemp(prefix="two-machines-")), names, addresses, cables)
    try:
        for name in names:
            _ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            pairs = zip(addresses, NAMES, strict=True)
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for address, host in pairs))
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                _ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for process in machines.running:
            kill_tree(process)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        shutil.rmtree(machines.folder, ignore_errors=True)


def one_machine_out_of_reach() -> dict[str, Any]:
    """Train on one machine while the other tries to reach all its listening ports; return the result's hash, too."""
    with two_machines() as machines:
        training = machines.start(0, machines.script("2", 0))
        # To test the scan itself: it must find this port, which is open on purpose.
        opened = machines.start(0, [sys.executable, "-m", "http.server", "29999", "--bind", machines.addresses[0]])
        wait_until(
            lambda: step_of(machines.run) >= NUM_BATCHES, TIMEOUT_S, lambda: f"an epoch; {machines.last_words()}"
        )
        ports = _listening_ports(machines.namespaces[0])
        reached = _reachable_ports(machines, ports)
        kill_tree(opened)
        machines.finish(training)
        require("29999" in reached, f"the scan missed the open port among {ports}")
        require(len(ports) >= 5, f"too few ports to be a training's: {ports}")  # two stores, two of gloo's, ours
        require(reached == ["29999"], f"reachable from the other machine: {reached}")
        return {"ports": len(ports) - 1, "reachable": len(reached) - 1, "hash": result_of(machines.run)["hash"]}


def undisturbed(reference: str) -> dict[str, Any]:
    """Train on both machines; the result must equal that of one machine bitwise."""
    with two_machines() as machines:
        start_s = time.monotonic()
        training = [machines.launch(number) for number in (0, 1)]
        for process in training:
            machines.finish(process)
        _require_same(machines, reference)
        return {"seconds": round(time.monotonic() - start_s, 1)}


def lost_and_replaced(reference: str, launch: Launch = TwoMachines.launch) -> dict[str, Any]:
    """Kill the second machine's launcher and rank and start it again; the result must be bitwise equal."""
    with two_machines() as machines:
        first, second = (launch(machines, number) for number in (0, 1))
        _wait_for_the_middle(machines)
        _kill(machines, second)
        time.sleep(3)
        starts, back_s = len(starts_of(machines.run)), time.monotonic()
        second = launch(machines, 1)
        wait_until(
            lambda: len(starts_of(machines.run)) > starts, TIMEOUT_S, lambda: f"a start; {machines.last_words()}"
        )
        recovery_s = time.monotonic() - back_s
        for process in (first, second):
            machines.finish(process)
        _require_same(machines, reference)
        return {"seconds from its return to training": round(recovery_s, 1)}


def lost_for_good(*, silently: bool = False) -> dict[str, Any]:
    """Lose the second machine of an elastic pair; the first one must finish alone.

    Normally the lost machine's connections are closed, as by a kill or a reboot. With `silently` they are not, and only
    the group's timeout reveals the loss.
    """
    limit = {"NCCL_TIMEOUT": "10"} if silently else {}
    with two_machines() as machines:
        first, second = (machines.launch(number, "1:2", NODE_RANK=str(number), **limit) for number in (0, 1))
        _wait_for_the_middle(machines)
        if silently:
            machines.unplug(1)
        step = _kill(machines, second)
        starts = starts_of(machines.run)
        require([start["world_size"] for start in starts] == [2], f"not one start of two: {starts}")

        def what() -> str:
            return f"a start on one machine; {machines.last_words()}"

        recovery_s = wait_until(lambda: len(starts_of(machines.run)) > 1, TIMEOUT_S, what)
        machines.finish(first)
        result, last = result_of(machines.run), starts_of(machines.run)[-1]
        require(last["world_size"] == 1, f"continued with {last['world_size']} ranks")
        require(last["step"] >= step, f"continued from step {last['step']}, lost at {step}")
        require(result["step"] == TOTAL_STEPS, f"ended at step {result['step']} of {TOTAL_STEPS}")
        return {"seconds from the loss to training": round(recovery_s, 1)}


def lost_meeting_place(reference: str) -> dict[str, Any]:
    """Kill what a shell loop around train_ddp.sh runs on the rendezvous machine; both machines' loops start it again."""
    with two_machines() as machines:
        loop = 'for attempt in 1 2 3 4 5; do "$@" && exit 0; sleep 1; done; exit 1'
        facts = {"NNODES": "2", "MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT}
        loops = [
            machines.start(number, ["bash", "-c", loop, "loop", *machines.script("1", number)], **facts)
            for number in (0, 1)
        ]
        _wait_for_the_middle(machines)
        _kill(machines, loops[0], itself=False)
        starts = len(starts_of(machines.run))

        def what() -> str:
            return f"a new start; {machines.last_words()}"

        recovery_s = wait_until(lambda: len(starts_of(machines.run)) > starts, TIMEOUT_S, what)
        for process in loops:
            machines.finish(process)
        _require_same(machines, reference)
        return {"seconds from the loss to training": round(recovery_s, 1)}


def run(trials: int = 1) -> dict[str, Any]:
    """Run every scenario `trials` times; return the report of `run_trials`."""
    reference: list[str] = []

    def out_of_reach() -> dict[str, Any]:
        figures = one_machine_out_of_reach()
        reference.append(figures.pop("hash"))
        require(reference[-1] == reference[0], "two undisturbed trainings differ")
        return figures

    replaced = "second machine lost and replaced"
    trial_of: dict[str, Trial] = {
        "S6 ports of one machine's run": out_of_reach,
        "R14 two machines, undisturbed": lambda: undisturbed(reference[0]),
        f"R14 {replaced}": lambda: lost_and_replaced(reference[0]),
        f"R14 {replaced}, static rendezvous": lambda: lost_and_replaced(reference[0], TwoMachines.launch_numbered),
        f"R18 {replaced}, Kubeflow's variables": lambda: lost_and_replaced(
            reference[0], TwoMachines.launch_as_kubeflow
        ),
        "R15 elastic, second machine lost for good": lost_for_good,
        "R15 the same, connections not closed, timeout 10 s": lambda: lost_for_good(silently=True),
        "R16 first machine lost, a loop on both": lambda: lost_meeting_place(reference[0]),
    }
    what = "two machines (network namespaces): out of reach, lost, replaced, alone"
    return run_trials("R14 R15 R16 R18 S6", what, trials, trial_of, reason_to_skip())


def _wait_for_the_middle(machines: TwoMachines) -> None:
    wait_until(
        lambda: step_of(machines.run) >= 2 * NUM_BATCHES, TIMEOUT_S, lambda: f"two epochs; {machines.last_words()}"
    )


def _kill(machines: TwoMachines, process: subprocess.Popen[bytes], *, itself: bool = True) -> int:
    """Kill what runs on a machine in the middle of the training; return the step of the newest checkpoint at that time."""
    step = step_of(machines.run)
    kill_tree(process, itself=itself)
    require(not (machines.run / "result.json").exists(), "the training was over before the kill")
    return step


def _require_same(machines: TwoMachines, reference: str) -> None:
    result = result_of(machines.run)
    require(result["step"] == TOTAL_STEPS, f"ended at step {result['step']} of {TOTAL_STEPS}")
    require(result["world_size"] == 2, f"ended with {result['world_size']} rank(s)")
    require(result["hash"] == reference, "other weights than those of one machine")


def _listening_ports(namespace: str) -> list[str]:
    tables = _ip("netns", "exec", namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
    rows = [line.split() for line in tables if ":" in line]
    return sorted({str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == LISTENING})


def _reachable_ports(machines: TwoMachines, ports: list[str]) -> list[str]:
    command = ["netns", "exec", machines.namespaces[1], sys.executable, "-S", "-c", CONNECT, machines.addresses[0]]
    return _ip(*command, *ports).split()


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ScenarioFailed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(print_report(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
