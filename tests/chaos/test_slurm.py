"""Slurm's daemons on this machine: a job that is told to stop leaves with code 75, returns, and
ends with the same bits.

Needs root and `apt-get install -y --no-install-recommends slurm-wlm munge slurm-client`.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.jobs import Job, require
from tests.chaos.machines import (
    TIMEOUT_S,
    TRAINING,
    assert_same_result,
    script,
    starts_of,
    step_of,
    wait_until,
)
from tests.chaos.small_training import NUM_BATCHES
from tests.chaos.trainings import SMALL_TRAINING
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "sinfo", "srun")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=small
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_delay_s}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=20
{requeue_exit}
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 \
    Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str:
    """Return why no cluster can be started here; empty when it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    return f"needs {', '.join(missing)}" if missing else ""


pytestmark = pytest.mark.skipif(
    bool(reason_to_skip()), reason=f"{reason_to_skip()} (apt-get install slurm-wlm munge)"
)


@dataclass
class SmallCluster:
    """Two virtual nodes, and the jobs' files in `folder`; see `small_cluster`."""

    folder: Path
    daemons: list[Job] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables with which Slurm's commands find this cluster."""
        return {
            **TRAINING,
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": SEARCH,
            **extra,
        }

    def start_daemon(self, *command: str) -> None:
        """Start a program in the foreground; `small_cluster` kills it at the end."""
        self.daemons.append(Job(command, self.folder / "daemons.log", **self.environment()))

    def ask(self, *command: str, **environment: str) -> str:
        variables = {**os.environ, **self.environment(**environment)}
        done = subprocess.run(
            command, env=variables, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
        )
        return done.stdout.strip()

    def submit(self, *options: str, num_nodes: int = 1, step_s: float = 0.1) -> str:
        """Submit launch/slurm.sbatch with a small training of two processes; return the job's
        number.
        """
        facts = {
            "PROJECT": str(PROJECT_FOLDER),
            "RUN_FOLDER": str(self.run),
            "PROCESSES": str(2 // num_nodes),
            "MASTER_ADDR": "127.0.0.1",  # the names of virtual nodes cannot be resolved
        }
        batch_script = str(PROJECT_FOLDER / "launch" / "slurm.sbatch")
        ours = ["--parsable", f"--nodes={num_nodes}", "--output=job.log"]
        return self.ask("sbatch", *ours, *options, batch_script, "--step-s", str(step_s), **facts)

    def fact_of(self, job: str, name: str) -> str:
        words = self.ask("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def last_words(self) -> str:
        logs = [self.folder / name for name in ("daemons.log", "slurmctld.log", "job.log")]
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())

    def wait_until(
        self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S
    ) -> float:
        return wait_until(condition, what, self.last_words, timeout_s)

    def assert_completes(self, job: str, reference: str) -> None:
        """Wait for the end of a job; fail unless it completed with the reference's weights."""
        over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        self.wait_until(
            lambda: self.fact_of(job, "JobState") in over, "end of the job", 3 * TIMEOUT_S
        )
        assert self.fact_of(job, "JobState") == "COMPLETED", self.last_words()
        assert_same_result(self.run, reference)


@contextmanager
def small_cluster(*, requeues_code_75: bool = False) -> Iterator[SmallCluster]:
    """Start munge and Slurm with their own key, ports and folders; at the end kill all their
    processes.
    """
    # pytest's are too long for the name of a socket
    folder = Path(tempfile.mkdtemp(prefix="small-cluster-"))
    cluster = SmallCluster(folder)
    try:
        configure(folder, requeues_code_75)
        start(cluster)
        yield cluster
    finally:
        # slurmstepd is not a child of slurmd and outlives it. It ends with its job.
        with suppress(AssertionError):
            cluster.ask("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(cluster.daemons):
            daemon.kill()
        end_steps(folder)
        shutil.rmtree(folder, ignore_errors=True)


def configure(folder: Path, requeues_code_75: bool) -> None:
    text = CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        ports=free_ports(),
        # a requeued job waits as long as a credential is valid; the default is 120 s
        requeue_delay_s=5,
        requeue_exit="RequeueExit=75" if requeues_code_75 else "",
    )
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (folder / "state").mkdir()


def start(cluster: SmallCluster) -> None:
    """Start the daemons; return when both nodes are idle."""
    folder = cluster.folder
    own = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    cluster.start_daemon(
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own
    )
    cluster.wait_until((folder / "munge.socket").exists, "munge's socket", 20)
    cluster.start_daemon("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
    for node in ("n0", "n1"):
        cluster.start_daemon("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node)

    def are_idle() -> bool:
        with suppress(AssertionError):  # the controller does not answer yet
            return (
                cluster.ask("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
                == 2
            )
        return False

    cluster.wait_until(are_idle, "two idle nodes", 40)


def free_ports() -> list[int]:
    """Return three free ports; the last two are consecutive."""
    while True:
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes[:2]:
                probe.bind(("127.0.0.1", 0))
            first, second = (int(probe.getsockname()[1]) for probe in probes[:2])
            with suppress(OSError, OverflowError):
                probes[2].bind(("127.0.0.1", second + 1))
                return [first, second, second + 1]


def end_steps(folder: Path) -> None:
    """Kill slurmstepd and its children: all processes with this cluster's folder in their
    environment.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get("SLURM_CONF", "").startswith(f"{folder}/")
                and process.pid != os.getpid()
            ):
                process.kill()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a training of two processes on this machine without Slurm."""
    folder = tmp_path_factory.mktemp("reference")
    require([*script(2, folder), "--step-s", "0"], folder / "log", **TRAINING)
    return str(read_mapping(folder / "run" / "result.json")["hash"])


@pytest.mark.chaos(1, 1)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_r17_the_batch_script_undisturbed(num_nodes: int, trial: int, reference: str) -> None:
    with small_cluster() as cluster:
        cluster.assert_completes(cluster.submit(num_nodes=num_nodes), reference)
        assert len(starts_of(cluster.run)) == 1


def assert_a_stop_returns(cluster: SmallCluster, by: str, reference: str) -> float:
    """Stop a running job once, by `requeue`, `signal` (exit 75) or `limit`; return the seconds
    until it continues.

    It must be requeued and end bitwise equal.
    """
    # Slurm checks limits every 30 s, so the signal comes 30 to 60 s after the start; training takes
    # 77 s.
    limit = ["--time=2", "--signal=TERM@60"] if by == "limit" else []
    job = cluster.submit(*limit, step_s=1.2 if by == "limit" else 0.1)
    reached = NUM_BATCHES if by == "limit" else 2 * NUM_BATCHES
    cluster.wait_until(lambda: step_of(cluster.run) >= reached, f"step {reached}")
    if by == "requeue":
        cluster.ask("scontrol", "requeue", job)
    elif by == "signal":
        cluster.ask("scancel", "--signal=TERM", job)
    recovery_s = cluster.wait_until(lambda: len(starts_of(cluster.run)) > 1, "second start")
    cluster.assert_completes(job, reference)
    # The last start, because the limit may also end a slow start before its first checkpoint.
    assert starts_of(cluster.run)[-1]["step"] >= reached
    return recovery_s


@pytest.mark.chaos(1, 1, always=True)
def test_r17_a_stopped_job_returns_from_the_queue_and_not_a_bit_differs(
    trial: int, reference: str, record_property: Any
) -> None:
    with small_cluster(requeues_code_75=True) as cluster:
        record_property("to continue s", assert_a_stop_returns(cluster, "signal", reference))
        assert len(starts_of(cluster.run)) == 2


@pytest.mark.chaos(1, 1)
@pytest.mark.parametrize("by", ["requeue", "limit"])
def test_r17_a_requeued_job_continues(
    by: str, trial: int, reference: str, record_property: Any
) -> None:
    with small_cluster() as cluster:
        record_property("to continue s", assert_a_stop_returns(cluster, by, reference))


@pytest.mark.chaos(1, 1)
def test_r17_a_job_is_stopped_before_its_training_can_react(trial: int, reference: str) -> None:
    with small_cluster() as cluster:
        job = cluster.submit()
        cluster.wait_until(
            lambda: "Starting 2 process(es)" in cluster.last_words(), "line of the launcher"
        )
        cluster.ask("scancel", "--signal=TERM", job)
        assert not starts_of(cluster.run), "the training had begun"
        cluster.assert_completes(job, reference)
        assert int(cluster.fact_of(job, "Restarts")) == 1


@pytest.mark.chaos(1, 1)
def test_r18_srun_starts_two_tasks_without_torchrun(trial: int, reference: str) -> None:
    with small_cluster() as cluster:
        for num_nodes in (1, 2):
            folder = cluster.folder / f"run{num_nodes}"
            options = [f"--nodes={num_nodes}", "--ntasks=2", "--immediate=60"]
            command = [sys.executable, str(SMALL_TRAINING), "--save-dir", str(folder)]
            cluster.ask("srun", *options, *command, MASTER_ADDR="127.0.0.1")
            assert_same_result(folder, reference)
        alone, batch_script = cluster.folder / "alone", cluster.folder / "alone.sh"
        command = [
            sys.executable,
            str(SMALL_TRAINING),
            "--save-dir",
            str(alone),
            "--epochs",
            "1",
            "--step-s",
            "0",
        ]
        batch_script.write_text(f"#!/bin/sh\nexec {' '.join(command)}\n")
        cluster.ask("sbatch", "--wait", "--ntasks=2", "--output=job.log", str(batch_script))
        assert read_mapping(alone / "result.json")["world_size"] == 1, (
            "a process in the batch shell is one of two"
        )
