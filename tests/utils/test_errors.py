"""Errors for the user, files that are written whole, and what is said of the environment."""

import os
import subprocess
import time
from pathlib import Path
from typing import IO, Any, BinaryIO

import pytest
import torch

from tests.support.plugin import PROJECT, must_run, run_script
from yolo_seg_ddp.predict.prediction_files import PartWriter, Source, merge_parts
from yolo_seg_ddp.utils import environment
from yolo_seg_ddp.utils.errors import UserError, explain_out_of_memory
from yolo_seg_ddp.utils.files import local_rank_first, new_file, write_bytes_atomic

SCRIPT = """
import atexit, sys
from yolo_seg_ddp.utils.errors import UserError, run_script

class Witness:
    def __del__(self):
        print("torn down", flush=True)

witness = Witness()
atexit.register(print, "cleaned up")

def main():
    print("unflushed", end=" ")
    if sys.argv[1:] == ["a bug"]:
        raise RuntimeError("a bug")
    if sys.argv[1:] == ["a closed file"]:
        raise PermissionError(13, "Permission denied", "photo.jpg")
    if sys.argv[1:] == ["a file as folder"]:
        raise FileExistsError(17, "File exists", "results")
    if sys.argv[1:] == ["a full disk"]:
        raise OSError(28, "No space left on device", "results")
    if sys.argv[1:] == ["no quota"]:
        raise OSError(122, "Disk quota exceeded")
    if len(sys.argv) > 1:
        raise UserError(sys.argv[1])
    return 75

run_script(main)
"""


FULL = "the disk is full; make room there, or name another place"
CLOSED = (
    "error: photo.jpg: Permission denied; give the user who runs this access to it and to its "
    "folder"
)


@pytest.mark.parametrize(
    ("words", "rank", "code", "said", "complaint"),
    [
        ((), "0", 75, "unflushed cleaned up\n", ""),
        ((), None, 75, "unflushed cleaned up\ntorn down\n", ""),
        (("no such file",), "0", 1, "unflushed cleaned up\n", "error: no such file"),
        (("no such file",), "1", 1, "unflushed cleaned up\n", "[rank 1] error: no such file"),
        (("a closed file",), "0", 1, "unflushed cleaned up\n", CLOSED),
        (
            ("a file as folder",),
            "0",
            1,
            "unflushed cleaned up\n",
            "error: results: File exists; name another place",
        ),
        (("a full disk",), "0", 1, "unflushed cleaned up\n", f"error: results: {FULL}"),
        (("no quota",), "0", 1, "unflushed cleaned up\n", f"error: a file: {FULL}"),
    ],
)
def test_a_script_leaves_with_its_code_and_one_line_and_a_rank_without_the_interpreters_teardown(
    words: tuple[str, ...],
    rank: str | None,
    code: int,
    said: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    done = run_script("python", "-c", SCRIPT, *words)
    assert (done.returncode, done.stdout, done.stderr.rstrip("\n")) == (code, said, complaint)


def test_a_bug_in_a_rank_keeps_its_traceback_and_waits_for_nobody() -> None:
    done = run_script("python", "-c", SCRIPT, "a bug", RANK="1")
    assert (done.returncode, done.stdout) == (1, "unflushed cleaned up\n")
    assert "Traceback" in done.stderr
    assert done.stderr.strip().endswith("RuntimeError: a bug")


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "GET was unable to find an engine",
        "FIND was unable to find an engine",
    ],
)
def test_used_up_memory_is_explained_whoever_notices_it(words: str) -> None:
    with (
        pytest.raises(UserError, match="use a smaller batch"),
        explain_out_of_memory("use a smaller batch"),
    ):
        raise RuntimeError(words)
    for error in (RuntimeError("illegal memory access"), ValueError(words)):
        with (
            pytest.raises(type(error), match=str(error)),
            explain_out_of_memory("use a smaller batch"),
        ):
            raise error


def test_a_long_name_of_another_alphabet_is_written(tmp_path: Path) -> None:
    file = tmp_path / ("写" * 83 + ".jpg")  # 253 bytes; a name has at most 255
    write_bytes_atomic(file, b"picture")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"picture"]


def fill(file: IO[Any]) -> None:
    """Let what is written into a file meet a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)


def test_a_full_disk_names_the_file_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_file(path: Path) -> BinaryIO:
        fill(file := new_file(path))
        return file

    (tmp_path / ".predictions.part-0").write_text("")
    monkeypatch.setattr("yolo_seg_ddp.utils.files.new_file", full_file)
    writer = PartWriter(tmp_path / "parts", ["*.txt", "*.json"], 0)
    for name, write in (
        ("a.txt", lambda: write_bytes_atomic(tmp_path / "a.txt", b"a")),
        ("0.txt", lambda: writer.__exit__(None, None, None)),
        (f".predictions.tmp-{os.getpid()}", lambda: merge_parts(tmp_path, 1)),
    ):
        if name == "0.txt":
            writer.write("*.txt", Source(0, tmp_path, "a"), {})
        with pytest.raises(OSError, match="No space left") as caught:
            write()
        assert Path(caught.value.filename).name == name
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == [".predictions.part-0"]


def test_one_process_at_a_time_holds_the_machines_lock(tmp_path: Path) -> None:
    lock_file = tmp_path / "new" / "job.lock"
    reader, writer = os.pipe()
    with local_rank_first(lock_file):
        child = os.fork()
        if child == 0:
            try:
                with local_rank_first(lock_file):
                    os.write(writer, b"child")
            finally:
                os._exit(0)
        time.sleep(0.2)
        os.write(writer, b"parent ")
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"parent child"


def test_environment_is_prepared_without_overriding_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "svg")
    for name in (
        "YOLO_OFFLINE",
        "YOLO_AUTOINSTALL",
        "ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS",
        "YOLO_CONFIG_DIR",
    ):
        monkeypatch.setenv(name, "to be removed again after the test")
        monkeypatch.delenv(name)
    environment.prepare_environment()
    assert os.environ["YOLO_OFFLINE"] == "1"
    assert os.environ["YOLO_AUTOINSTALL"] == "0"
    assert os.environ["ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS"] == "1"
    assert os.environ["MPLBACKEND"] == "svg"
    assert (
        Path(os.environ["YOLO_CONFIG_DIR"]) == tmp_path / ".cache" / "yolo-seg-ddp" / "ultralytics"
    )
    assert Path(os.environ["YOLO_CONFIG_DIR"]).is_dir()


def test_settings_go_to_the_temporary_folder_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = environment.user_folder("numba")
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    # Another user made the folder first, and could plant compiled code there.
    monkeypatch.setattr(
        environment.Path, "stat", lambda path: os.stat_result([0] * 4 + [os.getuid() + 1] + [0] * 5)
    )
    other = environment.user_folder("numba")
    assert other != folder
    assert os.listdir(other) == []


def test_torch_is_imported_before_ultralytics_can_limit_its_threads(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = (
        "import sys, yolo_seg_ddp.utils.environment as r; early = 'torch' in sys.modules; "
        "r.prepare_environment(); "
        "print(early, 'torch' in sys.modules, 'ultralytics' in sys.modules)"
    )
    assert must_run("python", "-c", code, PYTHONPATH=str(tmp_path)).split() == [
        "False",
        "True",
        "False",
    ]


def test_environment_report_names_versions_but_no_host() -> None:
    report = environment.environment_report()
    assert report["torch"] == torch.__version__
    assert int(report["usable_cores"]) >= 1
    names = "python torchvision ultralytics cuda cudnn nccl gpus cpu git_revision"
    assert set(names.split()) <= set(report)
    assert all(isinstance(value, str) and value for value in report.values())
    assert not {"host", "hostname", "user"} & set(report)


def test_git_revision_tells_changes_and_tolerates_absence(tmp_path: Path) -> None:
    assert environment.git_revision(tmp_path) == "unknown"
    (tmp_path / "file").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, timeout=20)
    clean = environment.git_revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert environment.git_revision(tmp_path) == clean + "+changes"


def test_the_projects_folder_comes_before_what_the_user_put_on_pythonpath(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/first", "/second"]))
    assert environment.python_path().split(os.pathsep) == [str(PROJECT), "/first", "/second"]
    monkeypatch.delenv("PYTHONPATH")
    assert environment.python_path() == str(PROJECT)
