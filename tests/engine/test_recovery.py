"""No work is lost: checkpoints within an epoch, a full disk, the stacks of a stall, another number
of ranks.
"""

import copy
import errno
import itertools
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.engine.small import CPU, CountedLoss, ScriptedTask, classifier, engine_of, points
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.engine import TrainingEngine, loop, recovery, stopping
from yolo_seg_ddp.engine.recovery import CannotSave
from yolo_seg_ddp.engine.reporting import EpochEnd
from yolo_seg_ddp.engine.state import Progress
from yolo_seg_ddp.run import checkpoint
from yolo_seg_ddp.run.checkpoint import latest_manifest, load_latest, save_checkpoint, verify
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.training import plan as train_plan
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.plan import batches_per_step, keep_threads, restore_resolved_options
from yolo_seg_ddp.utils.devices import Precision, choose_precision
from yolo_seg_ddp.utils.errors import EXIT_IO, UserError
from yolo_seg_ddp.yolo.optimizer import MuSGD

BATCHES = 12  # per epoch
MOMENTUM_SGD = partial(torch.optim.SGD, momentum=0.9)


class Killed(BaseException):
    """Stands for the end of the process."""


def train(
    folder: Path,
    *,
    epochs: int = 3,
    resume: bool = False,
    die_at: int | None = None,
    optimizer_type: Any = MOMENTUM_SGD,
    **options: Any,
) -> TrainingEngine:
    """Train a small classifier; `die_at` is the batch, counted over epochs, at which everything
    ends.
    """
    model, loader = classifier(), DataLoader(points(4 * BATCHES), batch_size=4)
    trainer = engine_of(model, folder, ema_decay=0.9999, epochs=epochs, **options)
    criterion = CountedLoss(die_at, Mock(side_effect=Killed))
    trainer.train(
        loader, loader, optimizer_type(model.parameters(), lr=0.1), criterion, resume=resume
    )
    return trainer


def die_at_the_second(
    patch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False
) -> None:
    """Let everything end at the second call of a method, before it does anything or after it."""
    method, count = getattr(owner, name), 0

    def deadly(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        answer = method(self, *arguments) if after or count != 2 else None
        if count == 2:
            raise Killed
        return answer

    patch.setattr(owner, name, deadly)


def assert_same_weights(first: TrainingEngine, second: TrainingEngine) -> None:
    for kind, module in first.state.modules().items():
        torch.testing.assert_close(
            second.state.modules()[kind].state_dict(), module.state_dict(), rtol=0, atol=0
        )


# --- checkpoints within an epoch ---


@pytest.mark.parametrize(("save_every_s", "saved_step"), [(0.0, BATCHES + 6), (None, BATCHES)])
def test_a_kill_within_an_epoch_loses_only_what_followed_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every_s: float | None, saved_step: int
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    whole = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(
            tmp_path / "killed",
            die_at=BATCHES + 8,
            save_every_s=save_every_s,
            manifest={"global_batch_size": 32},
        )
    facts = latest_manifest(tmp_path / "killed" / "checkpoint")
    assert (facts["step"], facts["global_batch_size"]) == (saved_step, 32)
    assert latest_manifest(tmp_path / "nowhere") == {}
    assert_same_weights(whole, train(tmp_path / "killed", resume=True))


def test_the_time_to_the_next_checkpoint_begins_at_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    # read at steps 0, 1, 2, 4, 6, ... and after a save
    clock_s = itertools.count(time.monotonic(), 30)

    def noting(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        saved.append(step)
        return save_checkpoint(folder, step, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save_checkpoint", noting)
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    train(tmp_path, epochs=1, save_every_s=80.0)
    assert saved == [4, 10, BATCHES]


@pytest.mark.parametrize("is_long", [True, False])
def test_a_kill_in_a_long_validation_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    monkeypatch.setattr(recovery, "LONG_VALIDATION_S", -1.0 if is_long else 1000.0)
    whole = train(tmp_path / "whole")
    die_at_the_second(monkeypatch, TrainingEngine, "validate")
    with pytest.raises(Killed):
        train(tmp_path / "killed")
    assert latest_manifest(tmp_path / "killed" / "checkpoint")["step"] == (
        2 * BATCHES if is_long else BATCHES
    )
    continued = train(tmp_path / "killed", resume=True)
    assert continued.progress.history["train_loss"] == whole.progress.history["train_loss"]
    assert continued.progress.history["val_loss"] == whole.progress.history["val_loss"]
    assert continued.progress.record_awaiting_validation is None
    assert_same_weights(whole, continued)


def test_an_epoch_killed_between_its_report_and_its_checkpoint_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so a checkpoint of its last step is there already
    monkeypatch.setattr(recovery, "LONG_VALIDATION_S", -1.0)
    die_at_the_second(monkeypatch, EpochEnd, "report", after=True)
    with pytest.raises(Killed):
        train(tmp_path)
    assert [record["epoch"] for record in read_epochs(tmp_path)] == [1, 2]
    assert latest_manifest(tmp_path / "checkpoint")["epoch"] == 1
    train(tmp_path, resume=True)
    assert [record["epoch"] for record in read_epochs(tmp_path)] == [1, 2, 3]
    assert latest_manifest(tmp_path / "checkpoint")["epoch"] == 3


# --- a disk that takes nothing ---


def fill_the_disk(patch: pytest.MonkeyPatch, refused: set[int]) -> None:
    """Refuse the given saves, counted from 1, as a full disk does."""
    calls = itertools.count(1)

    def save(*arguments: Any, **options: Any) -> Path:
        if next(calls) in refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_checkpoint(*arguments, **options)

    patch.setattr(checkpoint, "save_checkpoint", save)


def test_training_goes_on_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What succeeds between them lets the count begin again. At step 60 an older checkpoint makes
    # room, in vain.
    fill_the_disk(monkeypatch, {2, 3, 5, 6, 7})
    train(tmp_path, epochs=7)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    said = [
        (f"step {BATCHES * epoch}: No space left on device", f"({count} of 3")
        for epoch, count in ((2, 1), (3, 2), (5, 1), (6, 2))
    ]
    assert len(warnings) == len(said)
    assert all(
        problem in line and count in line
        for line, (problem, count) in zip(warnings, said, strict=True)
    )
    assert latest_manifest(tmp_path / "checkpoint")["step"] == 7 * BATCHES


def test_three_failures_in_a_row_end_the_training_and_keep_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, {2, 3, 4})
    with pytest.raises(
        CannotSave, match=r"no checkpoint at step 48: No space left on device; make room"
    ) as caught:
        train(tmp_path, epochs=6)
    assert caught.value.exit_code == EXIT_IO == 74
    assert latest_manifest(tmp_path / "checkpoint")["step"] == BATCHES


def test_a_stop_that_cannot_be_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, {1})
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    train_one_epoch = TrainingEngine.train_one_epoch

    def stopped(self: TrainingEngine, loader: Any) -> Any:
        self.stop_flag.set("test")
        return train_one_epoch(self, loader)

    monkeypatch.setattr(TrainingEngine, "train_one_epoch", stopped)
    with pytest.raises(CannotSave):
        train(tmp_path)


def test_all_but_the_newest_undamaged_checkpoint_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    for step in (1, 2, 3):
        save_checkpoint(folder, step, {"weights": torch.zeros(3)}, keep=3)
    (folder / "step-00000003" / "state.pt").write_bytes(b"damaged")

    def save_where_there_is_room(*arguments: Any, **options: Any) -> Path:
        if len(list(folder.iterdir())) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert verify(folder / "step-00000002") is None
        return save_checkpoint(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save_where_there_is_room)
    train(tmp_path, epochs=1)
    assert latest_manifest(folder)["step"] == BATCHES
    kept = list(folder.iterdir())
    for one in kept:
        (one / "state.pt").unlink()
    assert checkpoint.CheckpointFolders(folder).make_room() == 0
    assert list(folder.iterdir()) == kept, "nothing is removed where no checkpoint can be read"


def test_a_best_file_that_was_refused_is_written_by_the_next_good_epoch(tmp_path: Path) -> None:
    calls: list[str] = []

    class Refused(ScriptedTask):
        def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
            calls.append(path.name)
            if calls.count("best.pt") == 2 and path.name == "best.pt":
                raise OSError(errno.ENOSPC, "No space left on device")
            path.write_text(str(info["epoch"]), encoding="utf-8")

    trainer = train(tmp_path, epochs=4, task=Refused("val_loss", [1.0, 0.5, 0.9, 0.95]))
    assert (tmp_path / "best.pt").read_text(encoding="utf-8") == "3"
    assert (tmp_path / "last.pt").read_text(encoding="utf-8") == "4"
    assert (trainer.progress.best_value, trainer.progress.best_epoch) == (0.9, 2)


# --- another number of ranks ---


def test_with_one_global_batch_the_steps_see_the_same_images_at_any_world_size() -> None:
    def images_of_steps(world_size: int, batches: int) -> list[set[int]]:
        per_rank = []
        for rank in range(world_size):
            order = EpochBatches(50, 12 // world_size // batches, rank, world_size, 0, (), batches)
            per_rank.append([{index for _, index, *_ in batch} for batch in order])
        lengths = {len(order) for order in per_rank}
        assert len(lengths) == 1
        steps = lengths.pop() // batches
        return [
            set().union(
                *(order[step * batches + part] for order in per_rank for part in range(batches))
            )
            for step in range(steps)
        ]

    expected = images_of_steps(1, 1)
    assert set().union(*expected) == set(range(50))
    for world_size, batches in ((2, 1), (1, 2), (2, 3), (3, 2), (1, 4)):
        assert images_of_steps(world_size, batches) == expected


def test_accumulation_that_leaves_batches_empty_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"5 training images cannot fill 2 processes x --accumulate 3; use --accumulate 2",
    ):
        EpochBatches(5, 1, 0, 2, 0, (), 3)


def test_the_place_in_an_epoch_is_counted_in_the_new_batches() -> None:
    progress = Progress(epoch=1, batch=6, left_out=[[0, 2], [0, 3], [1, 4]])
    progress.regroup(2, 4)
    assert progress.batch == 12
    assert progress.left_out == [[0, 4], [0, 5], [0, 6], [0, 7], [1, 8], [1, 9], [1, 10], [1, 11]]
    progress.regroup(4, 2)
    assert progress.batch == 6


def test_another_number_of_ranks_keeps_the_images_per_step_or_is_refused() -> None:
    config, facts = TrainConfig(batch_size=8), {"global_batch_size": 32}
    found = [batches_per_step(config, world_size, facts) for world_size in (1, 2, 4, 8, 32)]
    assert found == [(8, 4), (8, 2), (8, 1), (4, 1), (1, 1)]
    assert batches_per_step(config, 2, {"global_batch_size": 24}) == (6, 2)
    assert batches_per_step(TrainConfig(batch_size=8, accumulate=3), 2, {}) == (8, 3)
    for world_size, possible in ((3, 2), (7, 4), (64, 32)):
        with pytest.raises(
            UserError,
            match=rf"which {world_size} processes cannot .* train_ddp\.sh {possible} -- --resume",
        ):
            batches_per_step(config, world_size, facts)


# --- what a run chose when it began ---


def test_a_run_that_continues_keeps_what_auto_chose_when_it_began() -> None:
    config = TrainConfig()
    kept, lines = restore_resolved_options(config, {"optimizer": "adamw", "amp": "off"}, CPU)
    assert (kept, lines) == ({"optimizer": "adamw", "amp": "off"}, [])
    assert restore_resolved_options(config, {}, CPU) == ({}, [])
    for optimizer, lr in (("musgd", 0.002), ("adamw", 0.0008)):
        chosen = {"optimizer": optimizer, "lr": lr}
        assert restore_resolved_options(config, chosen, CPU)[0] == chosen
    given = TrainConfig(optimizer="adamw", lr=0.5)
    assert "lr" not in restore_resolved_options(given, {"optimizer": "adamw", "lr": 0.0008}, CPU)[0]
    foreign = {"optimizer": "lion", "amp": 7}
    assert restore_resolved_options(config, foreign, CPU) == ({}, [])
    told = TrainConfig(optimizer="sgd", amp="bf16")
    assert restore_resolved_options(told, {"optimizer": "adamw", "amp": "off", "lr": 0.1}, CPU) == (
        {},
        [],
    )


def test_a_resumed_run_keeps_its_threads_with_as_many_cores_and_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_plan, "usable_cpu_count", lambda: 4)
    began = {"threads": 1, "cores": 4, "world_size": 1}
    assert keep_threads(3, 4, 1, began) == 1
    # although other programs are busy now
    assert keep_threads(1, 4, 1, {**began, "threads": 4}) == 4
    # a loader process has the fourth core now
    assert keep_threads(3, 3, 1, {**began, "threads": 4}) == 3
    assert keep_threads(3, 4, 1, {**began, "cores": 16}) == 3
    assert keep_threads(2, 2, 2, {**began, "threads": 4}) == 2
    assert keep_threads(3, 4, 1, {}) == 3  # a run of an earlier version


def test_a_precision_that_the_new_machine_has_not_is_told_of() -> None:
    kept, lines = restore_resolved_options(TrainConfig(), {"amp": "fp16"}, CPU)
    chosen = choose_precision("auto", CPU).name
    told = (
        "The run began with --amp fp16, which this device does not support; continuing with "
        f"{chosen}"
    )
    assert (kept, lines) == ({}, [told])


@pytest.mark.parametrize(
    ("first", "second", "held"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "it holds the state of AdamW"),
        (torch.optim.SGD, torch.optim.AdamW, "it holds the state of SGD"),
        (MuSGD, torch.optim.SGD, "it holds the state of MuSGD"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    tmp_path: Path, first: Any, second: Any, held: str
) -> None:
    train(tmp_path, epochs=1, optimizer_type=first)
    with pytest.raises(
        UserError, match=rf"step-00000012: not a checkpoint of this model.*{held}.*new --save-dir"
    ):
        train(tmp_path, resume=True, optimizer_type=second)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", 1, {"weights": torch.zeros(3)})
    with pytest.raises(UserError, match="step-00000001: not a checkpoint of this model"):
        train(tmp_path, resume=True)


def test_a_run_in_full_precision_resumes_with_a_gradient_scaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path, epochs=1).state.scaler.state_dict() == {}
    monkeypatch.setattr(
        loop, "choose_precision", lambda *_: Precision("off", None, use_scaler=True)
    )
    continued = train(tmp_path, epochs=2, resume=True)
    assert continued.progress.epoch == 2
    assert continued.state.scaler.get_scale() > 1


def odd(value: Any) -> Any:
    """Return a value of the same form in which each number, flag and tensor is another one."""
    if isinstance(value, dict):
        return {name: part if name == "params" else odd(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [odd(part) for part in value]
    if isinstance(value, bool):
        return not value
    return value + 3 if isinstance(value, int | float | torch.Tensor) else value


def test_a_checkpoint_brings_back_everything_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loop, "choose_precision", lambda *_: Precision("fp16", None, use_scaler=True)
    )
    engines = [train(tmp_path / name, epochs=1) for name in ("saved", "loaded")]
    for engine in engines:
        engine.state.scheduler = torch.optim.lr_scheduler.StepLR(
            engine.state.optimizer, step_size=2
        )
    states = [engine.state.state_dict() for engine in engines]
    assert all(states[0].values()), "an empty part proves nothing"
    expected = {**odd(states[0]), "accumulation_steps": states[0]["accumulation_steps"]}
    expected["progress"] |= {"left_out": [[2, 5]], "record_awaiting_validation": {"epoch": 7}}
    engines[1].state.load_state_dict(copy.deepcopy(expected))
    torch.testing.assert_close(engines[1].state.state_dict(), expected, rtol=0, atol=0)


def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """Until version 0.1 the record of an epoch that awaits its validation was called `trained`."""
    whole = train(tmp_path / "whole", epochs=2)
    train(tmp_path / "old", epochs=1)
    found = load_latest(tmp_path / "old" / "checkpoint")
    assert found is not None
    state = found[1]
    state["progress"]["trained"] = state["progress"].pop("record_awaiting_validation")
    del state["options"]
    save_checkpoint(tmp_path / "old" / "checkpoint", BATCHES + 1, {**state, "config": {}})
    continued = train(tmp_path / "old", epochs=2, resume=True)
    assert_same_weights(whole, continued)
