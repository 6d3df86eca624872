"""The copy of a run's folder in an object storage: complete, in an order that can always be
resumed, and harmless.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import wait_until
from tests.support.s3_server import S3Server, s3_server, use_empty_server
from yolo_seg_ddp.extras import mirror
from yolo_seg_ddp.run import sending
from yolo_seg_ddp.run.checkpoint import latest_manifest, save_checkpoint, verify
from yolo_seg_ddp.run.status import FINISHED, RUNNING, STOPPED, write_status
from yolo_seg_ddp.utils.errors import UserError

BUCKET = "runs"
ADDRESS = f"s3://{BUCKET}/mine"


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with s3_server(BUCKET) as server:
        yield server


@pytest.fixture
def server(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket, and short waits."""
    use_empty_server(moto, BUCKET, monkeypatch)
    for name, seconds in (("POLL_S", 0.02), ("MOST_BACKOFF_S", 0.05), ("STOP_WAIT_S", 10.0)):
        monkeypatch.setattr(sending, name, seconds)
    return moto


class Run:
    """A run's folder, written as a training would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("epochs: 3\n")
        write_status(folder, RUNNING)

    def save(self, step: int) -> None:
        """Write what an epoch writes, in its order."""
        (self.folder / "metrics.jsonl").write_text(f"{step}\n")
        for name in ("last.pt", "best.pt"):
            (self.folder / "new").write_bytes(b"weights %d" % step)
            os.replace(self.folder / "new", self.folder / name)
        save_checkpoint(
            self.folder / "checkpoint", step, {"step": torch.tensor(step)}, manifest={"epoch": step}
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that are copied: not the checkpoints before the newest."""
    newest = max(path.name for path in folder.glob("checkpoint/step-*"))
    files = [*folder.glob("*.*"), *folder.glob(f"checkpoint/{newest}/*")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def copies_in(server: S3Server, name: str = "run") -> dict[str, bytes]:
    prefix = f"mine/{name}/"
    return {key.removeprefix(prefix): server.content(key) for key in server.names(prefix)}


def has_only(server: S3Server, step: int) -> bool:
    """Return whether the bucket holds one checkpoint with both of its files."""
    names = [key.split("/")[3] for key in server.names("mine/run/checkpoint/")]
    return names == [f"step-{step:08d}"] * 2


def is_copied(server: S3Server, step: int) -> bool:
    return f"mine/run/checkpoint/step-{step:08d}/manifest.json" in server.names()


def test_each_save_is_copied_and_an_older_checkpoint_goes_when_the_new_one_is_there(
    server: S3Server, run: Run
) -> None:
    with mirror.Mirror(run.folder, ADDRESS, resumes=False):
        for step in (1, 2, 3):
            server.requests.clear()
            run.save(step)
            wait_until(partial(has_only, server, step))
        write_status(run.folder, FINISHED)
    assert copies_in(server) == files_of(run.folder)
    kinds = [f"{method} {Path(path).name}" for method, path in map(str.split, server.requests)]
    state, manifest = kinds.index("PUT state.pt"), kinds.index("PUT manifest.json")
    removed = next(
        number for number, kind in enumerate(kinds) if kind.startswith(("DELETE", "POST"))
    )
    assert (
        max(kinds.index(f"PUT {name}") for name in ("best.pt", "metrics.jsonl"))
        < state
        < manifest
        < removed
    )


def test_a_copy_that_breaks_at_any_request_leaves_a_checkpoint_that_can_be_resumed(
    server: S3Server, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1)
    copy = mirror.Mirror(run.folder, ADDRESS, resumes=True)
    copy._copy("step-00000001")
    run.save(2)
    tried, num_left = copy._storage.tried, 0

    def break_off(*arguments: Any, **named: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise UserError("the line broke")
        return tried(*arguments, **named)

    monkeypatch.setattr(copy._storage, "tried", break_off)
    is_whole, found = False, list[int]()
    while not is_whole:
        num_left = len(found)
        copy._copied.clear()
        with suppress(UserError):
            copy._copy("step-00000002")
            is_whole = True
        there = tmp_path / str(len(found))
        for name, content in copies_in(server).items():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            (there / name).write_bytes(content)
        found.append(int(latest_manifest(there / "checkpoint")["step"]))
        assert verify(there / "checkpoint" / f"step-{found[-1]:08d}") is None
        assert int((there / "metrics.jsonl").read_text()) >= found[-1]
        assert int((there / "best.pt").read_bytes()[-1:]) >= found[-1]
    assert found == sorted(found)
    assert {*found} == {1, 2}
    lost = Run(tmp_path / "lost" / "run").folder  # a later start wrote its options, and was killed
    mirror.fetch_lost_run(lost, ADDRESS, print)
    assert files_of(lost) == copies_in(server) == files_of(run.folder)


def test_a_storage_that_vanishes_stops_nothing_and_has_everything_when_it_returns(
    server: S3Server, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.save(1)
    with mirror.Mirror(run.folder, ADDRESS, resumes=False):
        wait_until(lambda: is_copied(server, 1))
        server.stop()
        for step in (2, 3):
            run.save(step)
            time.sleep(0.3)
        printed = capfd.readouterr()
        assert printed.err.count("\n") == 1
        assert printed.err.startswith("WARNING: --mirror: s3://runs/mine/run/")
        assert printed.err.endswith("training continues, and the rest is sent when this works\n")
        server.start()
        wait_until(lambda: is_copied(server, 3))
        wait_until(lambda: "--mirror: works again, and has everything\n" in capfd.readouterr().out)
        write_status(run.folder, FINISHED)
    assert copies_in(server) == files_of(run.folder)
    assert capfd.readouterr().err == ""


def test_a_storage_that_stays_away_is_named_at_the_end_in_bounded_time(
    server: S3Server, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    server.stop()
    start_s = time.monotonic()
    with mirror.Mirror(run.folder, ADDRESS, resumes=False):
        run.save(1)
        write_status(run.folder, STOPPED)
    server.start()
    assert time.monotonic() - start_s < sending.STOP_WAIT_S + 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("WARNING: --mirror lacks a part of this run (s3://runs/mine/run")
    assert last.endswith("; the same training command sends the rest")


def test_a_slow_storage_is_waited_for_no_longer_than_the_limit(
    server: S3Server, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sending, "STOP_WAIT_S", 0.3)
    run.save(1)
    with mirror.Mirror(run.folder, ADDRESS, resumes=False):
        wait_until(lambda: is_copied(server, 1))
        server.faults = {"state.pt": "late"}
        run.save(2)
        write_status(run.folder, STOPPED)
    assert "--mirror lacks a part of this run (not done after 0.3 s)" in capfd.readouterr().err
    server.faults = {}
    wait_until(lambda: is_copied(server, 2))


def test_a_copy_slower_than_the_saves_goes_on_with_the_newest_and_warns_of_nothing(
    server: S3Server, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    server.faults, server.times_left = {"best.pt": "late"}, 1
    run.save(1)
    with mirror.Mirror(run.folder, ADDRESS, resumes=True):
        wait_until(lambda: "best.pt" in str(server.requests))
        for step in (2, 3, 4):  # of which two are kept
            run.save(step)
        assert not is_copied(server, 1)
        wait_until(partial(has_only, server, 4))
        write_status(run.folder, FINISHED)
    assert copies_in(server) == files_of(run.folder)
    assert capfd.readouterr().err == ""


def test_a_new_run_sets_the_copy_of_an_earlier_one_aside(
    server: S3Server, run: Run, tmp_path: Path
) -> None:
    for step in (7, 2):
        with mirror.Mirror(run.folder, ADDRESS, resumes=False):
            run.save(step)
            wait_until(partial(is_copied, server, step))
            write_status(run.folder, FINISHED)
        if step == 7:
            earlier = copies_in(server)
            shutil.rmtree(run.folder)
            run = Run(tmp_path / "run")
    (aside,) = {name.split("/")[1] for name in server.names()} - {"run"}
    assert re.fullmatch(r"run-\d{8}T\d{6}Z", aside)
    assert copies_in(server, aside) == earlier
    assert copies_in(server) == files_of(run.folder)


def test_a_folder_of_another_disk_serves_as_a_bucket(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sending, "POLL_S", 0.02)
    address = f"file://{tmp_path}/other disk"
    for step in (1, 2):
        run.save(step)
        with mirror.Mirror(run.folder, address, resumes=step > 1):
            write_status(run.folder, FINISHED)
    assert files_of(tmp_path / "other disk" / "run") == files_of(run.folder)
    mirror.fetch_lost_run(tmp_path / "new" / "run", address, print)
    assert files_of(tmp_path / "new" / "run") == files_of(run.folder)
    assert capfd.readouterr().err == ""


def test_a_storage_that_cannot_be_asked_for_a_lost_run_is_an_error(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new run would take the place of the one that may be there.
    monkeypatch.setattr("yolo_seg_ddp.extras.mirror.fetching.PAUSES_S", (0.01,))
    server.stop()
    try:
        with pytest.raises(UserError, match=r"; check the network and AWS_ENDPOINT_URL$"):
            mirror.fetch_lost_run(tmp_path / "run", ADDRESS, print)
    finally:
        server.start()
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_checkpoint_is_left_as_it_is(server: S3Server, run: Run) -> None:
    run.save(1)
    before = files_of(run.folder)
    server.put(
        {
            "mine/run/checkpoint/step-00000009/manifest.json": b"{}",
            "mine/run/config.yaml": b"other: 1",
        }
    )
    mirror.fetch_lost_run(run.folder, ADDRESS, print)
    assert files_of(run.folder) == before
    assert server.requests[1:] == [
        f"PUT /{BUCKET}/mine/run/{name}"
        for name in ("checkpoint/step-00000009/manifest.json", "config.yaml")
    ]
