"""Tests of train_ddp.sh and yolo_seg_ddp/training/launch.py, with a stand-in trainer and mostly
without launching.
"""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, parse_args

from benchmarks.jobs import Job
from tests.commands.kubeflow import KUBEFLOW
from tests.support.oracle import draw_data
from tests.support.plugin import PROJECT, read_json
from tests.support.processes import is_running, wait_until
from yolo_seg_ddp.training import launch
from yolo_seg_ddp.utils.errors import UserError

SCRIPT = PROJECT / "train_ddp.sh"
TRAINER = """
import json, os, subprocess, sys, time
from pathlib import Path

helper = subprocess.Popen(["sleep", "120"]) if "--hang" in sys.argv else None
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
facts = {name: os.environ.get(name) for name in names}
facts.update(argv=sys.argv[1:], cwd=os.getcwd(), processes=[os.getpid()])
if helper:
    facts["processes"].append(helper.pid)
target = Path(os.environ["OUT_FOLDER"]) / f"rank{os.environ['RANK']}.json"
target.with_suffix(".tmp").write_text(json.dumps(facts))
target.with_suffix(".tmp").rename(target)
if helper:
    time.sleep(120)
"""

# In the group, list what this process, its launcher and its fellow listen on: all that the launcher
# started.
GROUP_TRAINER = """
import json, os
from pathlib import Path
import psutil, torch
from yolo_seg_ddp.utils.distributed import barrier, cleanup_ddp, setup_ddp

ranks = setup_ddp(torch.device("cpu"))
if ranks.is_main:
    launcher = psutil.Process().parent()
    processes = (launcher, *launcher.children())
    sockets = [socket for one in processes for socket in one.net_connections("tcp")]
    listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    Path(os.environ["OUT_FOLDER"], "addresses.json").write_text(json.dumps(listening))
barrier()
cleanup_ddp()
os._exit(0)  # as ranks leave, see yolo_seg_ddp/utils/errors.py
"""


# The ranks end as `--end` says; after a restart as `--then`.
ENDING_TRAINER = """
import os, signal, sys
from yolo_seg_ddp.utils.errors import UserError, run_script

def main():
    word = "--end" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "--then"
    how = sys.argv[sys.argv.index(word) + 1]
    if how == "no file":
        raise UserError("nothing.pt: no such file")
    if how == "a bug":
        raise RuntimeError("a bug")
    os.kill(os.getpid(), signal.SIGKILL)

run_script(main)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    trainer = tmp_path / "stand_in.py"
    trainer.write_text(TRAINER)
    ours = (
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "DRY_RUN",
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("PET_")
    }
    return {
        **inherited,
        "PYTHON": sys.executable,
        "TRAIN_SCRIPT": str(trainer),
        "OUT_FOLDER": str(tmp_path),
        "TMPDIR": str(tmp_path),  # torchrun leaves a log folder behind when it is stopped
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_script(
    environment: dict[str, str], *arguments: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    place: Any = {"cwd": environment["OUT_FOLDER"], "env": {**environment, **extra}}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, **place, capture_output=True, text=True, timeout=60, check=False)


TWO = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
ELASTIC = {"NNODES": "1:4", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29600"}
# a lost machine is missed soon
SOON = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5"
LATER = {"NNODES": "2:2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
MEETING = "--rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29600"
OURS = {"NNODES": "5", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        # Without a port two processes meet on the loopback at a free one.
        (
            "",
            {},
            "--nproc-per-node=2 --nnodes=1 --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1",
        ),
        ("3 --max-restarts 5", {}, "--nproc-per-node=3 --max-restarts=5"),
        ("1 --master_port=29713", {"MASTER_PORT": "29999"}, "--rdzv-endpoint=127.0.0.1:29713"),
        ("1 --master-port 29713", {"MASTER_PORT": "29999"}, "--rdzv-endpoint=127.0.0.1:29713"),
        ("2", TWO, "--nnodes=3 --node-rank=1 --master-addr=10.0.0.1 --master-port=29500"),
        ("2", ELASTIC, f"--nnodes=1:4 {MEETING} --rdzv-conf={SOON},is_host=true"),
        # torchrun takes the last value of a setting
        (
            "2 --rdzv-conf last_call_timeout=60",
            LATER,
            f"--rdzv-conf={SOON},is_host=false,last_call_timeout=60",
        ),
        # Kubeflow's variables serve where ours are unset. One machine is one machine even there:
        # else torchrun would take PET_NNODES and wait for the others.
        ("", KUBEFLOW, "--nproc-per-node=3 --nnodes=2 --node-rank=1"),
        ("", KUBEFLOW, "--master-addr=job-node-0-0.job --master-port=29400"),
        (
            "4",
            {**KUBEFLOW, **OURS},
            "--nproc-per-node=4 --nnodes=5 --node-rank=2 --master-addr=a --master-port=29501",
        ),
        ("2", {**KUBEFLOW, "NNODES": "1"}, "--nnodes=1"),
    ],
)
def test_words_and_variables_become_torchrun_s_options(
    words: str, environment: dict[str, str], expected: str
) -> None:
    asked = launch.read_launch(words.split(), environment)
    command = launch.torchrun_command(asked, asked.processes or launch.CPU_PROCESSES, "trainer.py")
    config_from_args(parse_args(command[3:]))  # torchrun understands it
    options = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert options == {**options, **dict(word.split("=", 1) for word in expected.split())}
    assert command.count("--rdzv-conf") <= 1


def test_numbers_become_trainer_options_and_trainer_flags_come_last(
    environment: dict[str, str],
) -> None:
    words = (
        "3",
        "16",
        "100",
        "640",
        "--max-restarts",
        "5",
        "--",
        "--lr",
        "0.02",
        "--name",
        "two words",
    )
    done = run_script(environment, *words, DRY_RUN="1", OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[:2] == ["OMP_NUM_THREADS=7", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    trainer = command[command.index(environment["TRAIN_SCRIPT"]) + 1 :]
    assert trainer == shlex.split(
        "--batch-size 16 --epochs 100 --img-size 640 --lr 0.02 --name 'two words'"
    )


@pytest.mark.parametrize(
    ("words", "extra", "message"),
    [
        ("four", {}, "`four` is not a whole number"),
        ("0", {}, "`0` is not a whole number"),
        ("2 16 x", {}, "`x` is not a whole number"),
        ("1 2 3 4 5", {}, "four numbers at most"),
        ("2 --epochs 3", {}, "--epochs is not a launcher option; trainer options stand after --"),
        ("2 --master-port", {}, "--master-port/--master_port: expected one argument"),
        ("2", {"MASTER_PORT": "http"}, "MASTER_PORT=http is not a port"),
        ("2", {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ("2", {"NNODES": "two", "MASTER_ADDR": "a"}, "NNODES=two"),
        ("2", {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "first"}, "NODE_RANK=first"),
    ],
)
def test_wrong_usage_is_named_and_leaves_with_two(
    words: str, extra: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.read_launch(words.split(), extra)
    error = capsys.readouterr().err
    assert message in error
    assert "usage: bash train_ddp.sh [N] [BATCH] [EPOCHS] [IMG_SIZE]" in error


def test_help_needs_nothing(environment: dict[str, str]) -> None:
    done = run_script(environment, "-h", PYTHON="/no/python")
    assert done.returncode == 0
    for word in ("TRAIN_SCRIPT", "DRY_RUN", "MASTER_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        assert word in done.stdout


def test_what_is_missing_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E "$@"\n')
    bare.chmod(0o755)
    done = run_script(environment, "2", PYTHON=str(bare))
    assert done.returncode == 1
    assert "lacks torch" in done.stderr
    assert "pip install -r requirements.txt" in done.stderr
    assert "no interpreter `/no/python`" in run_script(environment, "2", PYTHON="/no/python").stderr
    assert (
        "no trainer /no/trainer.py"
        in run_script(environment, "2", TRAIN_SCRIPT="/no/trainer.py").stderr
    )


def test_missing_data_stop_the_launch_in_one_line(
    environment: dict[str, str], tmp_path: Path
) -> None:
    data = tmp_path / "mine.yaml"
    data.write_text("train: train/images\nval: val/images\nnames: [pole]\n")
    done = run_script(environment, "2", "--", f"--data={data}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "mine.yaml: train:" in done.stderr
    assert "download_data.py" not in done.stderr


def test_data_of_the_flags_the_config_file_or_the_default_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, missing, config = (
        draw_data(tmp_path / "set", 1),
        tmp_path / "missing.yaml",
        tmp_path / "config.yaml",
    )
    config.write_text(f"data: {data}\n")
    # argparse keeps the last one
    launch.require_dataset(["--data", str(missing), "--data", str(data)], missing)
    launch.require_dataset([f"--data={data}"], missing)
    launch.require_dataset(["--config", str(config)], missing)
    launch.require_dataset([], data)
    launch.require_dataset([], None)
    launch.require_dataset(["--resume", "run"], missing)
    with pytest.raises(UserError, match=r"missing\.yaml"):
        launch.require_dataset([], missing)
    with pytest.raises(UserError, match="--config"):
        launch.require_dataset(["--config", str(missing)], data)
    missing.write_text("train: train/images\nval: val/images\nnames: [pole]\n")
    monkeypatch.setattr(launch, "DEFAULT_DATASET_YAML", missing)
    cure = "python download_data.py && python parse_labels.py"
    with pytest.raises(UserError, match=rf"missing\.yaml: train: .* does not exist; run {cure}"):
        launch.require_dataset([], missing)


def test_one_process_for_each_gpu_and_never_more() -> None:
    assert launch.plan_launch(None, [], gpus=4, cores=16) == launch.LaunchPlan(4, 1, "cuda")
    assert launch.plan_launch(None, [], gpus=0, cores=16) == launch.LaunchPlan(2, 6, "cpu")
    assert launch.plan_launch(3, ["--device", "cpu"], gpus=1, cores=12) == launch.LaunchPlan(
        3, 3, "cpu"
    )
    for flag in ("--num-workers=2", "--workers=2"):
        assert launch.plan_launch(1, [flag], gpus=1, cores=16) == launch.LaunchPlan(1, 14, "cuda")
    with pytest.raises(
        UserError,
        match=r"8 processes but 4 visible GPU\(s\).*train_ddp\.sh 4.*CUDA_VISIBLE_DEVICES",
    ):
        launch.plan_launch(8, [], gpus=4)


def test_a_port_in_use_is_refused_before_the_launch(environment: dict[str, str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run_script(environment, "1", MASTER_PORT=str(port))
        assert done.returncode == 1
        assert f"MASTER_PORT={port} cannot be used" in done.stderr
        assert done.stderr.count("\n") == 1
    launch.require_free_port(port)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--", "--end", "no file"), ()),
        (("--", "--end", "a bug"), ("RuntimeError: a bug", "Traceback", "exitcode  : 1 ")),
        (
            ("--max-restarts=1", "--", "--end", "no file", "--then", "signal"),
            ("failed (exitcode: -9)", "exitcode  : -9"),
        ),
    ],
)
def test_a_users_error_is_one_line_without_torchruns_report_and_a_crash_keeps_it(
    words: tuple[str, ...], expected: tuple[str, ...], environment: dict[str, str]
) -> None:
    Path(environment["TRAIN_SCRIPT"]).write_text(ENDING_TRAINER)
    done = run_script(environment, "2", *words, PYTHONPATH=str(SCRIPT.parent))
    assert done.returncode == 1
    assert done.stderr.count("error: nothing.pt: no such file") == words.count("no file")
    assert all(part in done.stderr for part in expected)
    assert expected or done.stderr.count("\n") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc (run them on Linux)")
def test_ranks_get_their_environment_and_listen_on_no_port_beyond_the_loopback(
    environment: dict[str, str], tmp_path: Path
) -> None:
    Path(environment["TRAIN_SCRIPT"]).write_text(TRAINER + GROUP_TRAINER)
    done = run_script(environment, "2", "4", "--", "--name", "a b", PYTHONPATH=str(SCRIPT.parent))
    assert done.returncode == 0, done.stderr
    facts = [read_json(tmp_path / f"rank{rank}.json") for rank in (0, 1)]
    for rank, fact in enumerate(facts):
        assert (fact["RANK"], fact["LOCAL_RANK"], fact["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert fact["argv"] == ["--batch-size", "4", "--name", "a b"]
        assert fact["MASTER_ADDR"] == "127.0.0.1"
        assert fact["cwd"] == str(SCRIPT.parent)
        assert fact["OMP_NUM_THREADS"] == str(launch.plan_launch(2, [], gpus=0).threads)
        assert fact["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert facts[0]["MASTER_PORT"] == facts[1]["MASTER_PORT"]
    addresses = read_json(tmp_path / "addresses.json")
    assert len(addresses) >= 3  # the launcher's store, rank 0's, and one of gloo's for each rank
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc (run them on Linux)")
def test_stopping_the_script_leaves_no_process(environment: dict[str, str], tmp_path: Path) -> None:
    files = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    with Job(["bash", SCRIPT, "2", "--", "--hang"], tmp_path / "log", **environment) as job:
        job.wait_until(lambda: all(file.is_file() for file in files), "both ranks", 40)
        processes = [process for file in files for process in read_json(file)["processes"]]
        assert len(processes) == 4
        assert all(is_running(process) for process in processes)
        job.popen.terminate()
        assert job.wait(15) == 1
        assert "Traceback" not in job.output()
        wait_until(lambda: not any(is_running(process) for process in processes), 5)
