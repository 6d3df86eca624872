"""Collectives: on two and three real processes, and alone."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.all_collectives import COLLECTIVES, wrong_collectives
from tests.support.ranks import RankFailed, run_ranks
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed import collectives
from yolo_seg_ddp.utils.errors import UserError


def arrays_of(rank: int) -> dict[str, np.ndarray]:
    """Return arrays whose shapes and kinds differ between ranks; rank 1 has nothing to say in two
    of them.
    """
    count = (3, 0, 2)[rank]
    return {
        "scores": np.linspace(0, 1, count, dtype=np.float32) + rank,
        "hits": np.full((count, 10), rank % 2 == 0),
        "ids": np.arange(5 * rank + 1, dtype=np.int64),
        "turned": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3) * (rank + 1)),
    }


def every_collective() -> dict[str, Any]:
    value, mixed = torch.ones(2), [torch.zeros(2, 2), torch.tensor(7) + distributed.rank()]
    address = mixed[0].data_ptr()
    distributed.all_reduce_sum(value)
    distributed.average_tensors(mixed)
    return {
        "place": (distributed.rank(), distributed.world_size(), distributed.is_distributed()),
        "wrong": wrong_collectives(),
        "gathered": distributed.gather_arrays(arrays_of(distributed.rank())),
        "left alone": [value.tolist(), mixed[0].data_ptr() == address, mixed[1].item()],
        "on main": fail_on_main(),
        "agreement": {changed: agreement(changed) for changed in ("", "weight", "half", "count")},
    }


@pytest.fixture(scope="module", params=[2, 3])
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found = run_ranks(every_collective, request.param)
    assert [answer["place"] for answer in found] == [
        (rank, request.param, True) for rank in range(request.param)
    ]
    return found


def test_arrays_of_any_shape_reach_every_rank_in_rank_order(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert len(answer["gathered"]) == len(answers)
        for rank, gathered in enumerate(answer["gathered"]):
            expected = arrays_of(rank)
            assert gathered.keys() == expected.keys()
            for name, array in expected.items():
                assert gathered[name].dtype == array.dtype
                np.testing.assert_array_equal(gathered[name], array, strict=True)
                gathered[name][...] = 0  # the result may be changed: it is no view of a message


def test_every_collective_is_right_sums_leave_the_argument_alone_and_averages_integers(
    answers: list[dict[str, Any]],
) -> None:
    documented = {
        name
        for name, value in vars(collectives).items()
        if callable(value)
        and "Every rank must reach this" in " ".join((value.__doc__ or "").split())
        and not name.startswith("_")
    }
    assert documented | {"barrier"} == COLLECTIVES.keys()
    for rank, answer in enumerate(answers):
        assert answer["wrong"] == []
        assert answer["left alone"] == [[1, 1], True, 7 + rank]


def fail_on_main() -> str:
    def action() -> str:
        raise UserError("only rank 0 reports this")

    try:
        distributed.run_on_main(action)
    except UserError as error:
        return str(error)
    except SystemExit as leaving:
        return f"left with {leaving.code}"
    return "nothing"


def test_what_fails_on_rank_0_ends_the_others_without_a_word(answers: list[dict[str, Any]]) -> None:
    first, *others = (answer["on main"] for answer in answers)
    assert first == "only rank 0 reports this"
    assert set(others) == {"left with 1"}


def agreement(changed: str) -> str:
    """Return what the check says on this rank when rank 1 holds another value in one tensor."""
    tensors = {
        "weight": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.tensor([1.5, float("nan"), 2.0]).half(),
        "count": torch.tensor(3),
        "empty": torch.zeros(0),
    }
    if changed and distributed.rank() == 1:
        tensors[changed] = torch.nextafter(tensors[changed].float(), torch.tensor(9.0)).to(
            tensors[changed].dtype
        ) + (changed != "weight")
    try:
        distributed.check_ranks_agree(tensors)
    except distributed.RankDisagreement as error:
        return str(error)
    return "agreed"


def test_ranks_that_drifted_apart_are_told_so_on_every_rank_and_equal_ones_agree(
    answers: list[dict[str, Any]],
) -> None:
    for answer in answers:
        lines = answer["agreement"]
        assert lines[""] == "agreed"
        for changed in ("weight", "half", "count"):
            assert (
                f"1 of 4 tensors differ between the ranks, the first is {changed}" in lines[changed]
            )


def test_without_a_group_every_function_answers_for_one_process() -> None:
    value = torch.ones(2)
    assert (distributed.rank(), distributed.world_size(), distributed.is_distributed()) == (
        0,
        1,
        False,
    )
    assert wrong_collectives() == []
    assert distributed.all_reduce_sum(value) is value
    distributed.cleanup_ddp()


def test_objects_are_not_gathered() -> None:
    with pytest.raises(TypeError, match="numeric"):
        collectives._encode({"names": np.array(["a", None], dtype=object)})


def work_on_each_machine(fails: bool) -> tuple[str | None, list[float]]:
    """Stand for two machines with one rank and with two: local ranks 0, 0 and 1.

    Rank 1's work takes long.
    """
    local_rank = (0, 0, 1)[distributed.rank()]

    def work() -> str:
        time.sleep(0.6 * distributed.rank())
        if fails and distributed.rank() == 1:
            raise ValueError("the trouble of the second machine")
        return f"done on {distributed.rank()}"

    start_s = time.monotonic()
    answer = distributed.run_once_per_machine(work, local_rank)
    return answer, [time.monotonic() - start_s]


def test_one_rank_of_each_machine_works_and_the_others_wait() -> None:
    answers = run_ranks(work_on_each_machine, 3, False)
    assert [answer for answer, _ in answers] == ["done on 0", "done on 1", None]
    assert all(waited_s >= 0.6 for _, (waited_s,) in answers)


def test_the_trouble_of_one_machine_ends_all_ranks() -> None:
    with pytest.raises(
        RankFailed, match=r"the trouble of the second machine|died without an answer"
    ):
        run_ranks(work_on_each_machine, 3, True)
