"""Resumable checkpoints: what was saved comes back, damage is seen, and no kill leaves a run
without one.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hostile import Call
from yolo_seg_ddp.run import checkpoint
from yolo_seg_ddp.run.checkpoint import (
    CheckpointFiles,
    has_checkpoint,
    latest_manifest,
    load_latest,
    load_state,
    save_checkpoint,
    verify,
)
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    return {
        "weights": torch.full((size,), float(step)),
        "progress": {"step": step, "history": [0.5, None, True]},
    }


def saved(folder: Path, *steps: int, keep: int = 9) -> list[Path]:
    return [save_checkpoint(folder, step, state_of(step), keep) for step in steps]


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def latest_step(folder: Path) -> int | None:
    found = load_latest(folder)
    if found is None:
        return None
    path, state = found
    assert path.name.startswith(f"step-{state['progress']['step']:08d}")
    assert torch.equal(
        state["weights"], torch.full_like(state["weights"], state["progress"]["step"])
    )
    return int(state["progress"]["step"])


def test_a_checkpoint_of_any_gpu_is_loaded_onto_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        path = save_checkpoint(tmp_path / "new" / "folder", 1, {"weights": torch.ones(3)})
    found = load_latest(path.parent)
    assert found is not None
    assert found[1]["weights"].device == torch.device("cpu")


def test_only_the_newest_are_kept_by_number_and_not_by_age(tmp_path: Path) -> None:
    saved(tmp_path, 9, 100, 20, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]
    saved(tmp_path, 101, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000101"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip_a_byte(path / "state.pt"), "checksum"),
        (lambda path: os.truncate(path / "state.pt", 100), "size"),
        (lambda path: (path / "state.pt").unlink(), "No such file"),
        (lambda path: (path / "manifest.json").unlink(), "No such file"),
        (lambda path: (path / "manifest.json").write_text("{}"), "unreadable"),
        (lambda path: (path / "manifest.json").write_text('{"size'), "unreadable"),
        (lambda path: (path / "manifest.json").write_text("[]"), "unreadable"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    first, second, third = saved(tmp_path, 1, 2, 3)
    damage(third)
    assert reason in str(verify(third))
    assert latest_step(tmp_path) == 2
    (third / "manifest.json").write_text("[]")
    assert latest_manifest(tmp_path)["step"] == 2
    flip_a_byte(second / "state.pt")
    assert latest_step(tmp_path) == 1
    flip_a_byte(first / "state.pt")
    with pytest.raises(
        UserError,
        match=r"no readable checkpoint \(step-00000003: .*step-00000001.*remove the folder",
    ):
        load_latest(tmp_path)


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": Call(os.mkdir, str(tmp_path / "was-run"))})
    assert verify(path) is None  # its checksum is right: only the loader can refuse it
    with pytest.raises(UserError, match=r"state\.pt: not a checkpoint of this trainer"):
        load_state(path / "state.pt")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off", [1, 2]])
def test_what_is_no_checkpoint_is_refused_in_one_line(
    tmp_path: Path, content: bytes | list[int]
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "state.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "state.pt")
    with pytest.raises(UserError, match="not a checkpoint of this trainer"):
        load_state(tmp_path / "state.pt")


def test_leftovers_of_a_kill_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent") is None
    (path,) = saved(tmp_path, 1)
    path.rename(tmp_path / ".tmp-step-00000009-123")
    (tmp_path / "step-00000010").write_text("a file")
    assert load_latest(tmp_path) is None
    saved(tmp_path, 2)
    assert latest_step(tmp_path) == 2
    assert not list(tmp_path.glob(".tmp*"))


def test_a_failed_save_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 2, {"lock": threading.Lock()})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    atomic_torch_save({"value": 1}, tmp_path / "out" / "best.pt")
    with pytest.raises(Exception, match="pickle"):
        atomic_torch_save(threading.Lock(), tmp_path / "out" / "best.pt")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["best.pt"]
    assert torch.load(tmp_path / "out" / "best.pt", weights_only=True) == {"value": 1}


def die_at(owner: Any, name: str, call: int) -> None:
    """Let this process die where it makes its `call`-th use of a function."""
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def deadly(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            if name == "save":
                arguments[1].write(b"half of what would have been")
                arguments[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, deadly)


KILLS = {
    "while state.pt is written": (torch, "save", 1),
    "before state.pt is flushed": (checkpoint.tensor_files, "flush_file", 1),
    "before the manifest is flushed": (checkpoint.tensor_files, "flush_file", 2),
    "before the folder gets its name": (os, "replace", 1),
    "before the name is flushed": (checkpoint.tensor_files, "flush_folder", 1),
    "before the old one is removed": (shutil, "rmtree", 2),
}


@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "next step"])
@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, moment: str, step: int
) -> None:
    saved(tmp_path, 1)

    def save_and_die() -> None:
        die_at(*KILLS[moment])
        save_checkpoint(tmp_path, step, state_of(step), keep=1)

    # A fork must not use PyTorch's threads: tensors stay below 30,000 elements.
    process = multiprocessing.get_context("fork").Process(target=save_and_die)
    process.start()
    process.join(timeout=20)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    renamed = list(KILLS).index(moment) >= 4
    assert latest_step(tmp_path) == (step if renamed else 1)
    saved(tmp_path, 3, keep=1)
    assert latest_step(tmp_path) == 3


def test_of_checkpoint_files_the_newest_is_kept_and_a_damaged_one_passed_over_or_named(
    tmp_path: Path,
) -> None:
    store = CheckpointFiles(tmp_path)
    assert (store.load(), has_checkpoint(tmp_path)) == (None, False)
    for step in (9, 10):
        store.save(step, state_of(step), {"config": {"lr": 0.1}})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-10.pt"]
    assert has_checkpoint(tmp_path)
    found = store.load()
    assert found is not None
    assert (found[0].name, found[1]["step"], found[1]["config"]) == ("ckpt-10.pt", 10, {"lr": 0.1})
    assert torch.equal(found[1]["weights"], state_of(10)["weights"])
    # a kill came between the writing of 10 and the removal of 8
    atomic_torch_save(state_of(8), tmp_path / "ckpt-8.pt")
    (tmp_path / "ckpt-10.pt").write_bytes(b"half")
    assert (store.load() or found)[0].name == "ckpt-8.pt"
    (tmp_path / "ckpt-8.pt").unlink()
    with pytest.raises(
        UserError,
        match=r"ckpt-10\.pt: not a checkpoint of this trainer .*; remove it to start afresh",
    ):
        store.load()
