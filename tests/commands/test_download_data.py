"""download_data.py: its flags, its messages, and a stop by the keyboard."""

import signal
import sys
from collections import deque
from pathlib import Path

import pytest

import download_data
from benchmarks.jobs import Job
from tests.prepare.download.archives import (
    add_two_circuits,
    circuit,
    files_under,
    folder_with,
    get,
    zip_bytes,
)
from tests.support.azure_server import AzureServer
from yolo_seg_ddp.utils.errors import UserError


def test_sample_takes_an_optional_number() -> None:
    complete = download_data.with_sample_size
    assert complete(["--sample"]) == ["--sample", "240"]
    assert complete(["--sample", "--output", "x"]) == ["--sample", "240", "--output", "x"]
    assert complete(["--sample", "12", "--seed", "3"]) == ["--sample", "12", "--seed", "3"]
    assert complete(["--sample=12"]) == ["--sample=12"]
    assert complete([]) == []


def test_script_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 2)))
    arguments = ["--base-url", str(folder), "--output", str(tmp_path / "raw")]
    with pytest.raises(UserError, match=r"has no Circuit10\.zip"):
        download_data.main(arguments)
    assert len(files_under(tmp_path / "raw" / "Circuit1")) == 2
    assert download_data.main([*arguments, "--circuits", "1"]) == 0
    assert "all 2 photographs are there, nothing to do" in capsys.readouterr().out


def test_keyboard_stop_leaves_a_part_file_that_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with AzureServer() as server:
        add_two_circuits(server)
        blob = server.blobs["Circuit1.zip"]
        # then nothing comes: the script waits between attempts
        blob.drop_after = deque([600_000, *[0] * 50])
        flags = ["--circuits", "1", "--base-url", server.url, "--output", str(tmp_path / "raw")]
        with Job([sys.executable, "download_data.py", *flags], tmp_path / "log") as job:
            job.wait_until(lambda: len(server.gets("Circuit1.zip")) >= 2, "a second attempt", 20)
            job.process.send_signal(signal.SIGINT)
            assert job.wait(20) == 130
        assert job.last_line().endswith(
            "stopped by the keyboard; run the same command again to continue"
        )
        assert "Traceback" not in job.output()
        blob.drop_after.clear()
        assert get(server, tmp_path / "raw").num_photographs == 6
        assert server.bytes_sent("Circuit1.zip") == len(blob.content)
