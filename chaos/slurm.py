"""A Slurm cluster on one machine, with its own daemons and configuration, and jobs that are stopped. Needs root.

apt-get install -y --no-install-recommends slurm-wlm munge slurm-client
python -m chaos.slurm [TRIALS]
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "sinfo", "srun")
TIMEOUT_S = 150.0
TOTAL_STEPS = 8 * NUM_BATCHES
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
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str:
    """Return why no cluster can be started here; empty when it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"needs {', '.join(missing)}" if missing else ""


@dataclass
class SmallCluster:
    """Two virtual nodes, and the jobs' files in `folder`; see `small_cluster`."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def environment(self, **extra: str) -> dict[str, str]:
        """Return an environment with which Slurm's commands find this cluster."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return clean_environment(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=path, **extra)

    def start_daemon(self, *command: str) -> None:
        """Start a program in the foreground; `small_cluster` kills it at the end."""
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log))

    def ask(self, *command: str, **environment: str) -> str:
        """Run one of Slurm's commands; return its output. Raises ScenarioFailed when it fails."""
        done = subprocess.run(
            command, env=self.environment(**environment), cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ScenarioFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def submit(self, *options: str, num_nodes: int = 1, step_s: float = 0.1) -> str:
        """Submit launch/slurm.sbatch with a small training of two processes; return the job's number."""
        facts = {
            "PROJECT": str(PROJECT),
            "RUN_FOLDER": str(self.run),
            "PROCESSES": str(2 // num_nodes),
            "MASTER_ADDR": "127.0.0.1",  # the names of virtual nodes cannot be resolved
        }
        script = str(PROJECT / "launch" / "slurm.sbatch")
        ours = ["--parsable", f"--nodes={num_nodes}", "--output=job.log"]
        return self.ask("sbatch", *ours, *options, script, "--step-s", str(step_s), **facts)

    def fact_of(self, job: str, name: str) -> str:
        """Return one fact about a job, as printed by scontrol."""
        words = self.ask("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def last_words(self) -> str:
        """Return the end of the job's log."""
        log = self.folder / "job.log"
        return log.read_text(errors="replace")[-2500:] if log.exists() else "no log"


@contextmanager
def small_cluster(*, requeues_code_75: bool) -> Iterator[SmallCluster]:
    """Start munge and Slurm with their own key, ports and folders; at the end kill all their processes."""
    cluster = SmallCluster(Path(tempfile.mkdtemp(prefix="small-cluster-")))
    try:
        _configure(cluster, requeues_code_75)
        _start(cluster)
        yield cluster
    finally:
        # slurmstepd is not a child of slurmd and outlives it. It ends with its job.
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", "--user=root"],
            env=cluster.environment(),
            capture_output=True,
            check=False,
        )
        for process in reversed(cluster.daemons):
            kill_tree(process)
        _end_steps(cluster)
        shutil.rmtree(cluster.folder, ignore_errors=True)


def stopped_while_running(reference: str, *, by: str) -> dict[str, Any]:
    """Stop a running job once, by `requeue`, `signal` (exit 75) or `limit`; it must be requeued and end bitwise equal."""
    with small_cluster(requeues_code_75=by == "signal") as cluster:
        # Slurm checks limits every 30 s, so the signal comes 30 to 60 s after the start; training takes 77 s.
        limit = ["--time=2", "--signal=TERM@60"] if by == "limit" else []
        job = cluster.submit(*limit, step_s=1.2 if by == "limit" else 0.1)
        reached = NUM_BATCHES if by == "limit" else 2 * NUM_BATCHES
        wait_until(
            lambda: step_of(cluster.run) >= reached, TIMEOUT_S, lambda: f"step {reached}; {cluster.last_words()}"
        )
        if by == "requeue":
            cluster.ask("scontrol", "requeue", job)
        elif by == "signal":
            cluster.ask("scancel", "--signal=TERM", job)

        def what() -> str:
            return f"the second start; {cluster.last_words()}"

        recovery_s = wait_until(lambda: len(starts_of(cluster.run)) > 1, TIMEOUT_S, what)
        _require_end(cluster, job, reference)
        starts = starts_of(cluster.run)
        # The last start, because the limit may also end a slow start before its first checkpoint.
        step = starts[-1]["step"]
        require(step >= reached, f"continued from step {step}")
        return {"starts": len(starts), "continued from step": step, "seconds to continue": round(recovery_s, 1)}


def stopped_at_the_start(reference: str) -> dict[str, Any]:
    """Stop a job before its training can react to the signal; it must be requeued all the same."""
    with small_cluster(requeues_code_75=False) as cluster:
        job = cluster.submit()
        wait_until(lambda: "Starting 2 process(es)" in cluster.last_words(), TIMEOUT_S, "the launcher's first line")
        cluster.ask("scancel", "--signal=TERM", job)
        require(not starts_of(cluster.run), "the training had begun")
        _require_end(cluster, job, reference)
        require(int(cluster.fact_of(job, "Restarts")) == 1, "was not requeued exactly once")
        return {}


def plain_srun(reference: str) -> dict[str, Any]:
    """Start two tasks with srun, without torchrun, on one node and on two; and one process in the batch shell, alone."""
    with small_cluster(requeues_code_75=False) as cluster:
        for num_nodes in (1, 2):
            folder = cluster.folder / f"run{num_nodes}"
            command = [sys.executable, str(TRAINER), "--save-dir", str(folder)]
            options = [f"--nodes={num_nodes}", "--ntasks=2", "--immediate=60"]
            cluster.ask("srun", *options, *command, MASTER_ADDR="127.0.0.1")
            _require_same(folder, reference)
        alone = cluster.folder / "alone"
        script = cluster.folder / "alone.sh"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {TRAINER} --save-dir {alone} --epochs 1 --step-s 0\n")
        cluster.ask("sbatch", "--wait", "--ntasks=2", "--output=job.log", str(script))
        require(result_of(alone)["world_size"] == 1, "a process in the batch shell trained as one of two")
        return {}


def undisturbed(reference: str, *, num_nodes: int) -> dict[str, Any]:
    """Run the batch script undisturbed on one virtual node or on two."""
    with small_cluster(requeues_code_75=False) as cluster:
        job = cluster.submit(num_nodes=num_nodes)
        _require_end(cluster, job, reference)
        require(len(starts_of(cluster.run)) == 1, "started more than once")
        return {}


def reference_hash() -> str:
    """Train with two processes on this machine without Slurm; return the result's hash."""
    with tempfile.TemporaryDirectory(prefix="reference-") as name:
        folder = Path(name)
        options = ["--log-dir", str(folder / "ranks"), "--", "--save-dir", str(folder / "run"), "--step-s", "0"]
        command = ["bash", str(PROJECT / "train_ddp.sh"), "2", *options]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        require(done.returncode == 0, done.stderr[-2000:])
        return str(result_of(folder / "run")["hash"])


def run(trials: int = 1) -> dict[str, Any]:
    """Run every scenario `trials` times; return the report of `run_trials`."""
    reason = reason_to_skip()
    reference = "" if reason else reference_hash()
    trial_of: dict[str, Trial] = {
        "batch script, one node": lambda: undisturbed(reference, num_nodes=1),
        "batch script, two nodes": lambda: undisturbed(reference, num_nodes=2),
        "R17 scontrol requeue": lambda: stopped_while_running(reference, by="requeue"),
        "R17 SIGTERM, exit 75": lambda: stopped_while_running(reference, by="signal"),
        "R17 SIGTERM before the training": lambda: stopped_at_the_start(reference),
        "R17 time limit": lambda: stopped_while_running(reference, by="limit"),
        "R18 plain srun": lambda: plain_srun(reference),
    }
    return run_trials("R17 R18", "Slurm: jobs stopped and requeued; tasks without torchrun", trials, trial_of, reason)


def _configure(cluster: SmallCluster, requeues_code_75: bool) -> None:
    text = CONFIGURATION.format(
        folder=cluster.folder,
        host=socket.gethostname().partition(".")[0],
        ports=_free_ports(),
        requeue_delay_s=5,  # a requeued job waits as long as a credential is valid; the default is 120 s
        requeue_exit="RequeueExit=75" if requeues_code_75 else "",
    )
    (cluster.folder / "slurm.conf").write_text(text)
    key = cluster.folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (cluster.folder / "state").mkdir()


def _start(cluster: SmallCluster) -> None:
    def path(name: str) -> str:
        return f"{cluster.folder}/{name}"

    def num_idle() -> int:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, check=False)
        return done.stdout.split().count("idle")

    own = [f"--{what}-file={path(f'munge.{what}')}" for what in ("key", "pid", "log", "seed")]
    cluster.start_daemon("munged", "--foreground", "--force", f"--socket={path('munge.socket')}", *own)
    wait_until(lambda: Path(path("munge.socket")).exists(), 20, "munge's socket")
    cluster.start_daemon("slurmctld", "-D", "-f", path("slurm.conf"))
    for node in ("n0", "n1"):
        cluster.start_daemon("slurmd", "-D", "-f", path("slurm.conf"), "-N", node)
    logs = [cluster.folder / "daemons.log", cluster.folder / "slurmctld.log"]

    def words() -> str:
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())

    try:
        wait_until(lambda: num_idle() == 2, 40, "two idle nodes")
    except ScenarioFailed as failed:
        raise ScenarioFailed(f"{failed}: {words()}") from failed


def _free_ports() -> list[int]:
    """Return three free ports; the last two are consecutive."""
    while True:
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes[:2]:
                probe.bind(("127.0.0.1", 0))
            first, second = (int(probe.getsockname()[1]) for probe in probes[:2])
            try:
                probes[2].bind(("127.0.0.1", second + 1))
            except (OSError, OverflowError):
                continue
            return [first, second, second + 1]


def _end_steps(cluster: SmallCluster) -> None:
    """Kill slurmstepd and its children: all processes with this cluster's folder in their environment."""
    mark = f"SLURM_CONF={cluster.folder}/".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                os.kill(int(folder.name), 9)
        except (OSError, ProcessLookupError):  # it ended meanwhile
            continue


def _require_end(cluster: SmallCluster, job: str, reference: str) -> None:
    def state() -> str:
        return cluster.fact_of(job, "JobState")

    over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
    wait_until(lambda: state() in over, 3 * TIMEOUT_S, lambda: f"the end of the job; {cluster.last_words()}")
    require(state() == "COMPLETED", f"{state()}: {cluster.last_words()}")
    _require_same(cluster.run, reference)


def _require_same(folder: Path, reference: str) -> None:
    result = result_of(folder)
    require(result["step"] == TOTAL_STEPS, f"ended at step {result['step']} of {TOTAL_STEPS}")
    require(result["world_size"] == 2, f"ended with {result['world_size']} rank(s)")
    require(result["hash"] == reference, "other weights than without Slurm")


if __name__ == "__main__":
    sys.exit(print_report(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
