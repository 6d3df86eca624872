"""Meeting without ghosts: dead ranks' keys, ranks that never come, and real restarts under
torchrun.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.plugin import free_port, run_script
from yolo_seg_ddp.utils.distributed.process_group import COUNTER, Rendezvous
from yolo_seg_ddp.utils.environment import python_path
from yolo_seg_ddp.utils.errors import EXIT_STARTUP_TIMEOUT, UserError

# Rank 1 kills itself once, in the middle of its work; the restarted ranks must meet and add up.
RESTARTED = """
import os, signal, sys
import torch
import torch.distributed as dist
from yolo_seg_ddp.utils.distributed import all_reduce_sum, cleanup_ddp, rank, setup_ddp
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
setup_ddp(torch.device("cpu"))
for step in range(4):
    total = all_reduce_sum(torch.ones(3))
    if attempt == 0 and step == 2 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
assert total.tolist() == [2.0, 2.0, 2.0]
if rank() == 0:
    print(f"done at attempt {attempt}", flush=True)
cleanup_ddp()
os._exit(0)  # as ranks leave, see yolo_seg_ddp/utils/errors.py
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Return the launcher's store, as ranks find it in their environment."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return server


def meet(rank: int, found: dict[int, str], all_here: threading.Barrier) -> None:
    with Rendezvous(rank, True, timeout_s=120) as meeting:
        all_here.wait(timeout=120)
        if rank == 0:
            meeting.set("name", "this start")
        meeting.wait(["name"])
        found[rank] = meeting.get("name").decode()


def test_ranks_meet_among_the_keys_of_dead_ones(store: dist.TCPStore) -> None:
    # the rank of number 2 died before it wrote its token
    for number, token in ((1, "dead-a"), (3, "dead-b")):
        store.set(f"rendezvous/token/{number}", token)
    store.add(COUNTER, 3)
    store.set("rendezvous/answer/dead-a", "an earlier start")
    found: dict[int, str] = {}
    all_here = threading.Barrier(3)  # as the group is: rank 0 answers until everybody has come
    threads = [threading.Thread(target=meet, args=(rank, found, all_here)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(timeout=120)
    assert found == {0: "this start", 1: "this start", 2: "this start"}


def test_every_start_has_a_name_of_its_own(store: dist.TCPStore) -> None:
    with Rendezvous(0, True, timeout_s=120) as first:
        first.set("address", "old")
    with Rendezvous(0, True, timeout_s=120) as second:
        assert not second.check(["address"])


def test_a_rank_whose_rank_0_never_comes_says_so(store: dist.TCPStore) -> None:
    with (
        pytest.raises(UserError, match=r"rank 1: rank 0 did not answer within 0 s.*127.0.0.1"),
        Rendezvous(1, True, 0.3),
    ):
        pytest.fail("there is nobody to meet")


def test_rank_0_s_own_store_listens_on_loopback_alone_and_a_taken_port_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with Rendezvous(0, True, timeout_s=120) as store:
        store.set("key", "value")
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening
        with (
            pytest.raises(UserError, match=f"MASTER_PORT={port}"),
            Rendezvous(0, True, timeout_s=5),
        ):
            pytest.fail("two hosts on one port")


def test_a_start_in_time_is_left_alone_and_one_that_hangs_ends_with_its_own_code() -> None:
    program = (
        "import time\nfrom yolo_seg_ddp.utils.distributed.process_group import startup_watchdog\n"
        "with startup_watchdog(0.3):\n    pass\ntime.sleep(0.6)\nprint('alive', flush=True)\n"
        "with startup_watchdog(0.5):\n    time.sleep(100)\n"
    )
    done = run_script("python", "-c", program, timeout_s=90)
    assert done.returncode == EXIT_STARTUP_TIMEOUT == 76
    assert done.stdout == "alive\n"
    assert "not all ranks joined within 0 s" in done.stderr
    assert 'File "<string>", line 8' in done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
        ["--master-addr=127.0.0.1"],
    ],
    ids=["c10d", "static"],
)
def test_a_killed_rank_is_back_at_the_first_restart(launcher: list[str], tmp_path: Path) -> None:
    """Plain torchrun without the variable that the project's own launcher sets."""
    script = tmp_path / "ranks.py"
    script.write_text(RESTARTED)
    port = [f"--master-port={free_port()}"] if "--master-addr=127.0.0.1" in launcher else []
    start = [sys.executable, "-m", "torch.distributed.run", *launcher, *port, "--nproc-per-node=2"]
    command = [*start, "--max-restarts=3", f"--log-dir={tmp_path / 'logs'}", str(script)]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    }
    environment = {
        **inherited,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "INIT_TIMEOUT": "60",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "done at attempt 1"
