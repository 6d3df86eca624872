"""The process group: rank variables, timeouts, and a group made by somebody else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from utils import distributed
from utils.common.errors import UserError
from utils.distributed import process_group


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
    ("given", "missing"),
    [
        ({"RANK": "0"}, "LOCAL_RANK, WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
    ],
)
def test_half_set_rank_variables_are_refused(
    no_rank_variables: pytest.MonkeyPatch, given: dict[str, str], missing: str
) -> None:
    for name, value in given.items():
        no_rank_variables.setenv(name, value)
    with pytest.raises(UserError, match=missing):
        distributed.read_rank_environment()


@pytest.mark.parametrize(("rank", "local_rank", "fits"), [(1, 1, True), (2, 0, False), (-1, 0, False), (0, 2, False)])
def test_ranks_outside_the_world_are_refused(
    no_rank_variables: pytest.MonkeyPatch, rank: int, local_rank: int, fits: bool
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2}.items():
        no_rank_variables.setenv(name, str(value))
    if fits:
        assert distributed.read_rank_environment() == distributed.RankInfo(rank, local_rank, 2, 2)
    else:
        with pytest.raises(UserError, match=f"RANK={rank} LOCAL_RANK={local_rank}"):
            distributed.read_rank_environment()


def test_a_wrong_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "30min")
    with pytest.raises(UserError, match="NCCL_TIMEOUT=30min"):
        process_group._seconds_of("NCCL_TIMEOUT", 1.0)
