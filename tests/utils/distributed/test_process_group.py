"""Process groups, the launchers' variables, and ranks that the project starts itself."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed import process_group, rank_processes
from yolo_seg_ddp.utils.distributed.process_group import tasks_of_nodes, variables_from_launcher
from yolo_seg_ddp.utils.errors import UserError


def guest() -> tuple[bool, bool]:
    """Train in a group that another made, and tell what was left of it; then in one of our own."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.setup_ddp(torch.device("cpu"))
    distributed.cleanup_ddp()
    left = dist.is_initialized()
    dist.destroy_process_group()
    distributed.setup_ddp(torch.device("cpu"))
    distributed.cleanup_ddp()
    return left, dist.is_initialized()


def test_a_group_made_by_somebody_else_is_theirs_to_end() -> None:
    assert run_ranks(guest, 1, join=False) == [(True, False)]


@pytest.fixture
def no_rank_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ("RANK=1", "LOCAL_RANK, WORLD_SIZE is not set"),
        ("WORLD_SIZE=1", "RANK, LOCAL_RANK is not set"),
        ("RANK=1 WORLD_SIZE=1", "LOCAL_RANK is not set"),
        ("RANK=2 LOCAL_RANK=0 WORLD_SIZE=2", "RANK=2 LOCAL_RANK=0"),  # outside the world
        ("RANK=-1 LOCAL_RANK=0 WORLD_SIZE=2", "RANK=-1 LOCAL_RANK=0"),
        ("RANK=0 LOCAL_RANK=2 WORLD_SIZE=2", "RANK=0 LOCAL_RANK=2"),
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2",
            r"but not MASTER_PORT, a number, .* launch with torchrun",
        ),
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=many",
            r"but not MASTER_PORT, a number, .* launch with torchrun",
        ),
    ],
)
def test_half_set_or_impossible_rank_variables_are_refused(
    no_rank_variables: pytest.MonkeyPatch, variables: str, reason: str
) -> None:
    no_rank_variables.delenv("MASTER_PORT", raising=False)
    for pair in variables.split():
        no_rank_variables.setenv(*pair.split("="))
    with pytest.raises(UserError, match=reason):
        distributed.setup_ddp(torch.device("cpu"))


def test_a_wrong_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "30min")
    with pytest.raises(UserError, match="NCCL_TIMEOUT=30min"):
        process_group._seconds_of("NCCL_TIMEOUT", 1.0)


# What `srun --nodes=2 --ntasks=3` told its last task (Slurm 22.05), and what sbatch tells its own
# shell.
SLURM_TASK = {
    "SLURM_JOB_ID": "34521",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
SLURM_TASK |= {"SLURM_NODEID": "1", "SLURM_NTASKS": "3"}
SLURM_TASK |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
SLURM_SHELL = {"SLURM_JOB_ID": "34521", "SLURM_NTASKS": "8"}
SLURM_SHELL |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
MPI_TASK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
MPI_TASK |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def test_a_task_of_srun_on_several_machines_needs_the_first_one_s_address() -> None:
    with pytest.raises(
        UserError,
        match=r"3 tasks on several machines but MASTER_ADDR is not set.*scontrol show hostn",
    ):
        variables_from_launcher(SLURM_TASK)
    expected = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    expected |= {"MASTER_ADDR": "node1", "MASTER_PORT": str(20000 + 4521 + 202)}
    assert variables_from_launcher({**SLURM_TASK, "MASTER_ADDR": "node1"}) == expected


def test_on_one_machine_the_ranks_meet_on_the_loopback() -> None:
    found = variables_from_launcher(
        {**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    )
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "3")
    found = variables_from_launcher(MPI_TASK)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (
        "1",
        "2",
        "1",
        "2",
    )
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert variables_from_launcher({**MPI_TASK, "MASTER_PORT": "29777"})["MASTER_PORT"] == "29777"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM_SHELL,
        {**SLURM_SHELL, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
        {**MPI_TASK, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["no launcher", "the shell of sbatch", "srun --pty bash", "mpirun -n 1"],
)
def test_a_lone_process_stays_a_single_one(
    no_rank_variables: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        no_rank_variables.setenv(name, value)
    assert distributed.read_rank_environment() == distributed.RankInfo(0, 0, 1, 1)
    assert "RANK" not in os.environ


def test_torchruns_variables_come_first_and_what_reads_them_later_finds_those_of_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", {**SLURM_TASK, **torchrun})
    assert distributed.read_rank_environment() == distributed.RankInfo(5, 1, 6, 2)
    monkeypatch.setattr(os, "environ", {**MPI_TASK})
    assert distributed.read_rank_environment() == distributed.RankInfo(1, 1, 2, 2)
    assert os.environ["RANK"] == "1"
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"


def test_slurm_s_short_form() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]
    assert tasks_of_nodes("two") == []
    with pytest.raises(
        UserError, match="SLURM_STEP_TASKS_PER_NODE=2 does not list node SLURM_NODEID=1"
    ):
        variables_from_launcher({**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "2"})


def test_ranks_find_job_place_and_the_user_s_modules_and_answer_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").write_text(
        "import os\n"
        "from yolo_seg_ddp.utils.distributed.rank_processes import read_job, write_answer\n"
        "def answer():\n"
        "    write_answer([read_job()['number'], os.environ['LOCAL_RANK'], "
        "os.environ['WORLD_SIZE']])\n"
    )
    earlier = str(tmp_path / "absent")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([earlier, str(tmp_path)]))
    code = "from of_the_user import answer; run_script(answer)"
    assert rank_processes.run_ranks(code, 2, {"number": 5}, timeout_s=300) == [
        [5, "0", "2"],
        [5, "1", "2"],
    ]


def test_a_rank_without_an_answer_gives_none() -> None:
    assert rank_processes.run_ranks("run_script(lambda: 0)", 1, {}, timeout_s=300) == [None]
