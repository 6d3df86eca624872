"""The logs in S3: moto's server, over HTTP, with answers that it delays or cuts off."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd_bt import s3_source, train
from crowd_bt.comparisons import load_prepared
from crowd_bt.options import TrainConfig

from tests.support.plugin import free_port, read_json, run_script
from tests.support.recipes import RECIPES, assert_refused, run_command
from tests.support.s3_server import ALWAYS, KEY_ID, SECRET, S3Server, s3_server, use_server
from yolo_seg_ddp.utils import storage
from yolo_seg_ddp.utils.errors import UserError

BUCKET, PREFIX = "surface-quality-dataset", "a_tests_logs/"
PAIR = {"img1": "a.png", "img2": "b.png", "choice": "left", "pair_type": "gold_gold"}
LOG = {"comparisons": [{**PAIR, "img1_category": "POS_4", "img2_category": "POS_1"}] * 10}


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """Start moto's server and fill its bucket."""
    with s3_server(BUCKET) as server:
        objects = {
            f"{PREFIX}{user}/comparison_data.json": json.dumps(LOG).encode()
            for user in ("ann", "bob", "dummy_1")
        }
        server.put(
            {
                **objects,
                f"{PREFIX}carl/notes.txt": b"no log",
                f"{PREFIX}dora/comparison_data.json": b"[",
            }
        )
        yield server


@pytest.fixture
def server(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    use_server(moto, monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3_source, "PAUSES_S", (0.01,))
    return moto


def prepare(folder: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    config = TrainConfig(data_source="s3", data_dir=str(folder), **{"s3_prefix": PREFIX, **options})
    s3_source.prepare_from_s3(config, lines.append)
    return lines


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare(folder, **options)
    message = str(caught.value)
    assert not any(part in message for part in ("\n", KEY_ID, SECRET))
    assert not (folder / "prepared" / "metadata.json").exists()
    return message


def test_logs_are_downloaded_once_and_kept_prepared(tmp_path: Path, server: S3Server) -> None:
    lines = prepare(tmp_path)
    assert lines[0].endswith("carl/comparison_data.json: not there; this user is left out")
    assert "dora/comparison_data.json: no JSON" in lines[1]
    assert lines[2] == "20 comparisons of 2 users; dropped 1 test users"
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("")
    found = load_prepared(tmp_path / "prepared", tmp_path, print)
    assert (len(found.train), len(found.val)) == (16, 4)
    assert {(row.annotator_id, row.annotator_reliability) for row in found.of("all")} == {
        ("ann", 1.0),
        ("bob", 1.0),
    }
    server.requests.clear()
    assert "remove it to download them again" in prepare(tmp_path)[0]
    assert server.requests == []
    with assert_refused("holds comparisons of another source"):
        prepare(tmp_path, s3_prefix="other/")
    written = "".join(file.read_text() for file in (tmp_path / "prepared").glob("*.json"))
    assert KEY_ID not in written
    assert SECRET not in written


def test_the_guides_s3_line_trains_after_make_data_and_after_the_remedy_that_an_error_names(
    tmp_path: Path, server: S3Server
) -> None:
    # What make_data.py had written stood in the place of the download, and --prepared-data-dir
    # switched S3 off.
    recipe, data = RECIPES / "crowd_bt", tmp_path / "data"
    counts = (
        "--num-pictures",
        "42",
        "--comparisons",
        "60",
        "--annotators",
        "3",
        "--per-annotator",
        "10",
    )
    made = run_script(
        "python", str(recipe / "make_data.py"), "--output", data, "--size", "32", *counts
    )
    assert made.returncode == 0, made.stderr
    logs = {file.parent.name: file for file in data.glob("users/*/*.json")}
    prefix = TrainConfig(data_source="s3").s3_prefix
    server.put({f"{prefix}{user}/{file.name}": file.read_bytes() for user, file in logs.items()})
    line = ("--data-source", "s3", "--backbone", "efficientnet_b5", "--lr", "5e-5")
    places = (
        "--data-dir",
        data,
        "--image-dir",
        data / "images",
        "--checkpoint-dir",
        tmp_path / "run",
    )
    small = ("--backbone", "test_resnet", "--no-pretrained", "--input-size", "32", "--epochs", "1")
    few = ("--batch-size", "8", "--num-workers", "0", "--device", "cpu")
    command = (recipe / "train_distributed.sh", "2", *line, *places, *small, *few)
    done = run_script(*command, MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Downloaded 3 logs from s3://{BUCKET}/{prefix} to {data / 'prepared'}" in done.stdout
    results = read_json(tmp_path / "run" / "evaluation_results.json")
    assert logs.keys() == results["annotators"].keys()
    shutil.rmtree(data / "prepared")
    shutil.move(data / "simulated", data / "prepared")  # as make_data.py wrote it once
    arguments = (*line, *places, *small, *few, "--no-auto-resume")
    with assert_refused(
        "holds comparisons of another source", "beside --data-source s3: --prepared-data-dir"
    ):
        run_command(train, *arguments)
    assert run_command(train, *arguments, "--prepared-data-dir", tmp_path / "other") == 0
    assert read_json(tmp_path / "other" / "metadata.json")["bucket"] == BUCKET
    assert not [file for file in tmp_path.rglob("*.lock") if file.is_file()]


def test_a_body_that_is_cut_off_is_read_again_and_then_refused(
    tmp_path: Path, server: S3Server
) -> None:
    server.faults, server.times_left = {"ann/": "short"}, 1
    assert "20 comparisons of 2 users; dropped 1 test users" in prepare(tmp_path / "again")
    server.times_left = ALWAYS
    message = refusal(tmp_path / "refused")
    assert message.startswith(f"s3://{BUCKET}/{PREFIX}ann/comparison_data.json: ")
    assert message.endswith("; check the network and AWS_ENDPOINT_URL")


def test_an_answer_that_comes_late_or_drips_is_given_up(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in ("late", "slow"):
        monkeypatch.setattr(storage, "BLOCK_TIMEOUT_S", 0.3)
        server.faults = {"bob/": fault}
        assert "bob/comparison_data.json: FSTimeoutError" in refusal(tmp_path)


def test_a_prefix_without_users_is_one_line(tmp_path: Path, server: S3Server) -> None:
    assert "no user's folder there; check --s3-bucket and --s3-prefix" in refusal(
        tmp_path, s3_prefix="nothing/"
    )
