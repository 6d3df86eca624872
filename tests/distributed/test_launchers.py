"""Slurm's and Open MPI's variables under torchrun's names, and the lone process that must stay one."""

from __future__ import annotations

import os

import pytest

from utils import distributed
from utils.common.errors import UserError
from utils.distributed.launchers import tasks_of_nodes, variables_from_launcher

# What `srun --nodes=2 --ntasks=3` told its last task (Slurm 22.05), and what sbatch tells its own shell.
SLURM_TASK = {
    "SLURM_JOB_ID": "34521",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
SLURM_SHELL = {
    "SLURM_JOB_ID": "34521",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
}
MPI_TASK = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_a_task_of_srun_on_several_machines() -> None:
    assert variables_from_launcher({**SLURM_TASK, "MASTER_ADDR": "node1"}) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(20000 + 4521 + 202),
    }


def test_several_machines_need_the_first_one_s_address() -> None:
    with pytest.raises(UserError, match=r"3 tasks on several machines but MASTER_ADDR is not set.*scontrol show hostn"):
        variables_from_launcher(SLURM_TASK)


def test_on_one_machine_the_ranks_meet_on_the_loopback() -> None:
    found = variables_from_launcher({**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"})
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "3")
    found = variables_from_launcher(MPI_TASK)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2", "1", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert variables_from_launcher({**MPI_TASK, "MASTER_PORT": "29777"})["MASTER_PORT"] == "29777"


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no launcher"),
        pytest.param(SLURM_SHELL, id="the shell of sbatch"),
        pytest.param({**SLURM_SHELL, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, id="srun --pty bash"),
        pytest.param({**MPI_TASK, "OMPI_COMM_WORLD_SIZE": "1"}, id="mpirun -n 1"),
    ],
)
def test_a_lone_process_stays_a_single_one(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed.read_rank_environment() == distributed.RankInfo(0, 0, 1, 1)
    assert "RANK" not in os.environ


def test_torchrun_s_own_variables_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**SLURM_TASK, **torchrun}.items():
        monkeypatch.setenv(name, value)
    assert distributed.read_rank_environment() == distributed.RankInfo(5, 1, 6, 2)


def test_everything_that_reads_the_environment_later_finds_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**MPI_TASK})
    assert distributed.read_rank_environment() == distributed.RankInfo(1, 1, 2, 2)
    assert os.environ["RANK"] == "1"
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"


def test_slurm_s_short_form() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]
    assert tasks_of_nodes("two") == []
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE=2 does not list node SLURM_NODEID=1"):
        variables_from_launcher({**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "2"})
