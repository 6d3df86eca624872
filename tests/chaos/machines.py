"""Two virtual machines: network namespaces with a cable between them, each with its own hostname.
Needs root on Linux.

Also what scenarios on several machines look at: the small training's files, and who ends in time.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.jobs import POLL_S, Job
from tests.chaos.small_training import NUM_BATCHES
from tests.chaos.trainings import SMALL_TRAINING
from tests.commands.kubeflow import KUBEFLOW
from yolo_seg_ddp.run.records import read_status
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER

NAMES = ("node0", "node1")
PORT = "29400"
TOTAL_STEPS = 8 * NUM_BATCHES
TIMEOUT_S = 150.0
# Makes train_ddp.sh start the small training, on the CPU.
TRAINING = {
    "PYTHON": sys.executable,
    "TRAIN_SCRIPT": str(SMALL_TRAINING),
    "CUDA_VISIBLE_DEVICES": "",
}
TRAINING |= {"INIT_TIMEOUT": "120", "NCCL_TIMEOUT": "60"}


def reason_to_skip() -> str:
    """Return why two machines cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = f"probe-{os.getpid()}"
    for verb in ("add", "del"):
        done = subprocess.run(
            ["ip", "netns", verb, probe], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"ip netns {verb}: {' '.join(done.stderr.split())[:100]}"
    return ""


def wait_until(
    condition: Callable[[], Any], what: str, last_words: Callable[[], str], timeout_s: float
) -> float:
    """Wait for a condition and return the seconds; fail after `timeout_s`."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, (
            f"no {what} within {timeout_s:.0f} s: {last_words()}"
        )
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def step_of(run: Path) -> int:
    """Return the optimizer step in the run's status; 0 if there is none."""
    return int(read_status(run).get("step", 0))


def starts_of(run: Path) -> list[dict[str, Any]]:
    file = run / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def assert_same_result(run: Path, reference: str) -> None:
    """Fail unless a small training ended on two ranks with all steps and the weights of the
    reference.
    """
    result = read_mapping(run / "result.json")
    assert result == {"hash": reference, "step": TOTAL_STEPS, "world_size": 2}


def script(processes: int, folder: Path, machine: int = 0) -> list[str]:
    """Return the command line of train_ddp.sh; three seconds of training."""
    options = ["--max-restarts", "3", "--log-dir", str(folder / f"ranks{machine}")]
    start = ["bash", str(PROJECT_FOLDER / "train_ddp.sh"), str(processes)]
    return [*start, *options, "--", "--save-dir", str(folder / "run"), "--step-s", "0.05"]


@dataclass
class TwoMachines:
    """Both machines, their shared folder and their running processes; see `two_machines`."""

    folder: Path
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    cables: tuple[str, str]
    running: list[Job] = field(default_factory=list)

    def start(self, machine: int, command: list[str], **environment: str) -> Job:
        """Start a command on a machine. Its output goes to `log<machine>`."""
        on_machine = [
            "ip",
            "netns",
            "exec",
            self.namespaces[machine],
            "unshare",
            "--uts",
            "--",
            "sh",
            "-c",
        ]
        become = ['hostname "$0"; exec "$@"', NAMES[machine]]
        job = Job(
            [*on_machine, *become, *command],
            self.folder / f"log{machine}",
            **{**TRAINING, **environment},
        )
        self.running.append(job)
        return job

    def launch(self, machine: int, nodes: str = "2", **environment: str) -> Job:
        """Start train_ddp.sh with one process on one of the two machines."""
        facts = {"NNODES": nodes, "MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT, **environment}
        return self.start(machine, script(1, self.folder, machine), **facts)

    def launch_numbered(self, machine: int) -> Job:
        """Start train_ddp.sh with NODE_RANK, which selects the static rendezvous."""
        return self.launch(machine, NODE_RANK=str(machine))

    def launch_as_kubeflow(self, machine: int) -> Job:
        """Start plain torchrun as Kubeflow Trainer does, configured by
        environment variables only.
        """
        own = {
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": NAMES[0],
            "PET_MASTER_PORT": PORT,
            "PET_MAX_RESTARTS": "3",
        }
        facts = {
            **KUBEFLOW,
            **own,
            "PET_NODE_RANK": str(machine),
            "PET_LOG_DIR": str(self.folder / f"ranks{machine}"),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        return self.start(
            machine, [*torchrun, str(SMALL_TRAINING), "--save-dir", str(self.run)], **facts
        )

    @property
    def run(self) -> Path:
        """The run folder, which both machines see."""
        return self.folder / "run"

    def unplug(self, machine: int) -> None:
        """Take a machine off the network, so that its connections end without notice."""
        ip("-n", self.namespaces[machine], "link", "set", self.cables[machine], "down")

    def wait_until(self, condition: Callable[[], Any], what: str) -> float:
        return wait_until(condition, what, self.last_words, TIMEOUT_S)

    def finish(self, *jobs: Job, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until jobs end; fail unless their exit codes are 0."""
        for job in jobs:
            assert job.wait(timeout_s) == 0, self.last_words()

    def kill_in_the_middle(self, job: Job, *, only_descendants: bool = False) -> int:
        """Kill what runs on a machine in the middle of the training; return
        the step at that time.
        """
        step = step_of(self.run)
        job.kill(only_descendants=only_descendants)
        assert not (self.run / "result.json").exists(), "the training was over before the kill"
        return step

    def last_words(self) -> str:
        return "\n".join(
            log.read_text(errors="replace")[-1500:] for log in sorted(self.folder.glob("log[01]"))
        )


@contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    """Make two namespaces with a cable between them; at the end remove them and kill all their
    processes.
    """
    mark = os.getpid()
    names = (f"chaos{mark}a", f"chaos{mark}b")
    cables = (f"cha{mark}"[:15], f"chb{mark}"[:15])
    addresses = (f"10.77.{mark % 250}.1", f"10.77.{mark % 250}.2")
    machines = TwoMachines(folder, names, addresses, cables)
    try:
        for name in names:
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            pairs = zip(addresses, NAMES, strict=True)
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for address, host in pairs)
            )
        ip(
            "link",
            "add",
            cables[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            cables[1],
            "netns",
            names[1],
        )
        for name, cable, address in zip(names, cables, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for job in machines.running:
            job.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout
