"""Non-finite losses: all ranks leave the same steps out, undo what several of them did, and save
nothing spoilt.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.small import classifier, engine_of, loader_of, plain, points
from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import loop
from yolo_seg_ddp.engine.recovery import Diverged, NonFiniteGuard, Recovery, RollBack, all_finite
from yolo_seg_ddp.engine.state import Progress
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.devices import Precision

NUM_BATCHES = 31  # an epoch ends between two regular checks, which are after every tenth step


def train_with_bad_batches(
    folder: Path, bad: list[int], *, fused: bool = True, always: bool = False
) -> dict[str, Any]:
    """Train two epochs; the last rank's loss is a NaN at the given batches, counted over the run as
    it is first seen.

    With `always` those batches are bad whenever they are seen.
    """
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    engine = engine_of(model, folder, ema_decay=0.9999, ema_ramp=5, clip_norm=1.0, epochs=2)
    seen = 0

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        loss = nn.functional.cross_entropy(outputs, labels)
        if not outputs.requires_grad:
            return loss
        number = engine.progress.epoch * NUM_BATCHES + engine.progress.batch if always else seen
        seen += 1
        is_last_rank = distributed.rank() == distributed.world_size() - 1
        return loss * float("nan") if number in bad and is_last_rank else loss

    count = NUM_BATCHES * 4 // distributed.world_size()
    loader = loader_of(points(count * distributed.world_size()), 4 // distributed.world_size())
    problem = ""
    try:
        engine.train(loader, loader_of(points(20, seed=1), 4), optimizer, criterion)
    except Diverged as error:
        problem = str(error)
    assert engine.state.ema is not None
    found = load_latest(folder / "checkpoint")
    return {
        "weights": plain(model.state_dict()),
        "finite": all_finite(
            [*model.state_dict().values(), *engine.state.ema.module.state_dict().values()]
        ),
        "saved": found is not None
        and all_finite(found[1]["model"].values())
        and all_finite(found[1]["ema"].values()),
        "skipped": engine.guard.counts()[0],
        "rollbacks": engine.recovery.num_rollbacks,
        "left_out": engine.progress.left_out,
        "steps": engine.progress.global_step,
        "problem": problem,
    }


def on_two_ranks(folder: Path) -> dict[str, Any]:
    return {
        "two": train_with_bad_batches(folder / "two", [5, 6]),
        "row": train_with_bad_batches(folder / "row", list(range(35, 41))),
        "end": train_with_bad_batches(
            folder / "end", list(range(2 * NUM_BATCHES - 5, 2 * NUM_BATCHES))
        ),
    }


def test_all_ranks_leave_out_spoilt_steps_and_undo_several_in_a_row(tmp_path: Path) -> None:
    answers = run_ranks(on_two_ranks, 2, tmp_path)
    for answer, (run, rollbacks) in itertools.product(
        answers, (("two", 0), ("row", 1), ("end", 1))
    ):
        found, first = answer[run], answers[0][run]
        assert found["rollbacks"] == rollbacks
        assert found["finite"]
        assert found["saved"]
        assert found["left_out"] == first["left_out"]
        np.testing.assert_equal(found["weights"], first["weights"])
    assert answers[0]["two"]["skipped"] == 2
    assert {epoch for epoch, _ in answers[0]["row"]["left_out"]} == {1}
    assert len(answers[0]["row"]["left_out"]) >= 5


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_left_out_changes_neither_weights_nor_momentum(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    guard = NonFiniteGuard(torch.device("cpu"))
    weight.grad = torch.tensor([0.5, 0.5])
    if guard.should_step(optimizer, weight.grad.norm()):
        optimizer.step()
    before, state = (
        weight.detach().clone(),
        {k: v.clone() for k, v in optimizer.state[weight].items()},
    )
    assert before.tolist() != [1.0, 2.0]
    weight.grad = torch.tensor([float("nan"), 0.5])
    if guard.should_step(optimizer, weight.grad.norm()):
        optimizer.step()
    assert torch.equal(weight, before)
    for name, value in state.items():
        assert torch.equal(optimizer.state[weight][name], value), name
    assert guard.counts() == (1, 1)
    weight.grad = torch.tensor([0.5, 0.5])
    if guard.should_step(optimizer, weight.grad.norm()):
        optimizer.step()
    assert not torch.equal(weight, before)
    assert guard.counts() == (1, 0)


def test_without_a_checkpoint_the_end_is_a_clear_line(tmp_path: Path) -> None:
    answer = train_with_bad_batches(tmp_path, list(range(12)))
    assert answer["problem"].startswith(
        "the gradient is not finite at step 10, before the first checkpoint; lower --lr"
    )
    assert answer["finite"]
    assert load_latest(tmp_path / "checkpoint") is None
    assert Diverged.exit_code == 70


def test_batches_that_are_always_bad_are_left_out_after_one_roll_back(tmp_path: Path) -> None:
    answer = train_with_bad_batches(tmp_path, list(range(35, 40)), always=True)
    assert (answer["rollbacks"], answer["problem"]) == (1, "")
    assert [1, 5] in answer["left_out"]
    assert answer["finite"]
    assert answer["steps"] == 2 * NUM_BATCHES - len(answer["left_out"])


def test_a_roll_back_leaves_out_whole_groups_of_accumulated_batches() -> None:
    # the last group: 2
    state = SimpleNamespace(progress=Progress(epoch=1, batch=30), accumulate=4, model=classifier())
    guard = SimpleNamespace(counts=lambda: (5, 5), num_reported=0)
    log = SimpleNamespace(print=lambda _: None, metrics=lambda _: None)
    recovery = Recovery(state, guard, log, *[None] * 3)  # type: ignore[arg-type]
    with pytest.raises(RollBack):
        recovery.require_health()
    first = recovery._suspects[0][1]
    assert first in (8, 12)
    assert recovery._suspects == [[1, number] for number in range(first, 30)]


def test_a_training_that_stays_bad_gives_up(tmp_path: Path) -> None:
    answer = train_with_bad_batches(tmp_path, list(range(NUM_BATCHES, 10_000)))
    assert "after 3 roll-backs" in answer["problem"]
    assert answer["saved"]


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_training_with_sgd_survives_an_overflow_in_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Issue: the scaler skipped the first step and left SGD's momentum uninitialised; the weights
    became NaN.
    """
    monkeypatch.setattr(
        loop, "choose_precision", lambda *_: Precision("fp16", None, use_scaler=True)
    )
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        answer = train_with_bad_batches(tmp_path, [0, 1, 20], fused=fused)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (answer["skipped"], answer["rollbacks"], answer["problem"]) == (3, 0, "")
    assert answer["finite"]
    assert answer["saved"]


def test_a_scaled_gradient_is_clipped_at_its_own_size(tmp_path: Path) -> None:
    def weights_after_an_epoch(scale: float | None) -> dict[str, np.ndarray]:
        model = classifier(norm=False)
        engine = engine_of(model, tmp_path / str(scale), clip_norm=0.5)
        engine.state.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, enabled=scale is not None
        )
        engine.begin(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
        engine.train_one_epoch(loader_of(points(32), 4))
        return plain(model.state_dict())

    scaled, unscaled = weights_after_an_epoch(1024.0), weights_after_an_epoch(None)
    np.testing.assert_equal(scaled, unscaled)


def test_finiteness_is_seen_in_every_kind_of_tensor() -> None:
    fine = [torch.ones(3), torch.arange(4), torch.zeros(0), torch.ones(2, dtype=torch.float16)]
    assert all_finite(fine)
    assert all_finite([])
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite([*fine, torch.tensor([1.0, bad])])
        assert not all_finite([torch.tensor([bad], dtype=torch.float16)])
