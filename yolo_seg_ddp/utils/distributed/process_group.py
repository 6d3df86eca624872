"""This process's rank, also from the variables of Slurm's `srun` and Open MPI's `mpirun`; the
process group; printing on rank 0.

The rendezvous of the ranks is safe after a restart. The launcher's key-value store outlives a
restart of the ranks and keeps the addresses of the dead ones. A new rank that reads such an address
waits for a process that no longer exists. So each rank writes a random token under the next number
of a counter and waits for the answer to this token, which only a living rank 0 gives. Rank 0
answers with a random name of this start, and the process group uses only keys below that name.
"""

import faulthandler
import math
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from yolo_seg_ddp.utils.distributed.collectives import barrier
from yolo_seg_ddp.utils.errors import EXIT_STARTUP_TIMEOUT, UserError, print_error

COUNTER = "rendezvous/counter"
POLL_S = 0.05
LOOPBACK = "127.0.0.1"


class StartTimeout(UserError):
    """A rank does not come, or is lost before the process group exists; launchers may try again."""

    exit_code = EXIT_STARTUP_TIMEOUT


class Rendezvous:
    """`with Rendezvous(...) as store:` gives a store whose keys only the ranks of this start use.

    Rank 0 answers until the block ends, so every rank must have joined the group before. With
    `is_one_machine` a store that rank 0 itself opens listens on the loopback interface only. Raises
    StartTimeout when rank 0 does not answer within `timeout_s`, UserError when the store is not
    reachable.
    """

    def __init__(self, rank: int, is_one_machine: bool, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.has_launchers_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        on_loopback = is_one_machine and not self.has_launchers_store
        try:
            self.port = int(os.environ["MASTER_PORT"])
            self.address = LOOPBACK if on_loopback else os.environ["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            lacking = "RANK and WORLD_SIZE are set, but not MASTER_PORT, a number, and MASTER_ADDR"
            raise UserError(f"{lacking}; launch with torchrun, or unset them") from error
        self._is_over = threading.Event()
        self._host: threading.Thread | None = None

    def __enter__(self) -> dist.Store:
        store = self._open(is_host=self.rank == 0 and not self.has_launchers_store)
        if self.rank == 0:
            name = uuid.uuid4().hex
            # A second connection: on a shared one a request could wait for another request.
            self._host = threading.Thread(
                target=self._answer, args=(self._open(is_host=False), name), daemon=True
            )
            self._host.start()
        else:
            name = self._ask(store)
        return dist.PrefixStore(f"rendezvous/{name}", store)

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._host is not None:
            self._host.join(timeout=5)

    def _open(self, is_host: bool) -> dist.TCPStore:
        timeout = timedelta(seconds=self.timeout_s)
        listener = None
        try:
            if is_host:
                interface = self.address if self.address == LOOPBACK else ""
                listener = socket.create_server((interface, self.port), backlog=1024)
            return dist.TCPStore(
                self.address,
                self.port,
                is_master=is_host,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"MASTER_ADDR={self.address} MASTER_PORT={self.port}: {reason}"
            ) from error

    def _ask(self, store: dist.Store) -> str:
        token = uuid.uuid4().hex
        store.set(f"rendezvous/token/{store.add(COUNTER, 1)}", token)
        answer = f"rendezvous/answer/{token}"
        deadline_s = time.monotonic() + self.timeout_s
        while not store.check([answer]):
            if time.monotonic() > deadline_s:
                raise StartTimeout(
                    f"rank {self.rank}: rank 0 did not answer within {self.timeout_s:.0f} s; "
                    f"did it start, and can every machine reach {self.address}:{self.port}?"
                )
            time.sleep(POLL_S)
        return store.get(answer).decode()

    def _answer(self, store: dist.Store, name: str) -> None:
        """Answer every token, also those of dead ranks, which nobody reads."""
        seen = 0
        waiting = set[int]()
        while not self._is_over.wait(POLL_S):
            count = store.add(COUNTER, 0)
            waiting |= set(range(seen + 1, count + 1))
            seen = count
            # A number may have no token yet: its rank is about to write it, or has died.
            for number in [
                number for number in waiting if store.check([f"rendezvous/token/{number}"])
            ]:
                store.set(
                    f"rendezvous/answer/{store.get(f'rendezvous/token/{number}').decode()}", name
                )
                waiting.remove(number)


@contextmanager
def startup_watchdog(timeout_s: float) -> Iterator[None]:
    """Print the stacks of all threads and exit with code 76 when the block takes longer than
    `timeout_s`.

    For waits that PyTorch does not limit, such as connecting to a dead rank.
    """
    timer = threading.Timer(timeout_s, _give_up, (timeout_s,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(timeout_s: float) -> None:
    print_error(f"not all ranks joined within {timeout_s:.0f} s; threads of process {os.getpid()}:")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(EXIT_STARTUP_TIMEOUT)


DEFAULT_PORT = 29500  # torchrun's
FIRST_PORT, NUM_PORTS = 20000, 10000  # below the ports that systems use for outgoing connections


def variables_from_launcher(
    environment: Mapping[str, str], *, will_meet: bool = True
) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {} for a
    single process.

    Reads the variables of the `srun` step: a shell of `salloc` or `sbatch` has SLURM_NTASKS of the
    whole allocation even for a single process. Raises UserError on several machines when
    MASTER_ADDR is not set, if the processes will meet.
    """
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        variables = _from_slurm(environment)
    elif _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        variables = {
            "RANK": environment["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": environment["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
            "LOCAL_WORLD_SIZE": environment["OMPI_COMM_WORLD_LOCAL_SIZE"],
            "MASTER_PORT": str(DEFAULT_PORT),
        }
    else:
        return {}
    if variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
        variables["MASTER_ADDR"] = LOOPBACK
    elif will_meet and "MASTER_ADDR" not in environment:
        raise UserError(
            f"{variables['WORLD_SIZE']} tasks on several machines but MASTER_ADDR is not set; "
            "before the launch: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), or '
            "the first machine's name"
        )
    return {
        **variables,
        **{
            name: environment[name]
            for name in ("MASTER_ADDR", "MASTER_PORT")
            if name in environment
        },
    }


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    per_node = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID")
    if not node < len(per_node):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={environment.get('SLURM_STEP_TASKS_PER_NODE')} does not "
            "list node "
            f"SLURM_NODEID={environment.get('SLURM_NODEID')}; launch with srun, or with torchrun"
        )
    # A port for each step of each job; with NUM_PORTS of them, two jobs on a node hardly ever share
    # one.
    port = (
        FIRST_PORT
        + (_number(environment, "SLURM_JOB_ID") + 101 * _number(environment, "SLURM_STEP_ID"))
        % NUM_PORTS
    )
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_PORT": str(port),
    }


def tasks_of_nodes(text: str) -> list[int]:
    """Parse Slurm's list of tasks on each node: `2(x3),1` is [2, 2, 2, 1].

    Returns [] for anything else.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0


DEFAULT_TIMEOUT_S = 300.0
DEFAULT_STARTUP_TIMEOUT_S = 900.0
Say = Callable[[str], None]  # prints its text on rank 0, does nothing on other ranks
_made_the_group = False  # whether this module made the process group, or the program that called it


@dataclass(frozen=True)
class RankInfo:
    """A process's rank, from its launcher's environment variables."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, the only one that writes files and prints."""
        return self.rank == 0


def main_printer(rank: int) -> Say:
    """Return `print` for rank 0, and a function that does nothing for every other rank."""
    return print if rank == 0 else lambda text: None


def read_rank_environment(*, will_meet: bool = True) -> RankInfo:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; without any of them this is the only
    process.

    Under `srun` or `mpirun` it first sets torchrun's variables in the environment from theirs.
    `will_meet`: whether the processes need an address to meet at. Raises UserError when only some
    are set: a guess could start N independent trainings.
    """
    required = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not any(name in os.environ for name in required):
        os.environ.update(variables_from_launcher(os.environ, will_meet=will_meet))
    missing = [name for name in required if name not in os.environ]
    if len(missing) == len(required):
        return RankInfo()
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not set but other rank variables are; launch with torchrun, "
            "or unset them"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    info = RankInfo(
        int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), world_size, local_world_size
    )
    if not (0 <= info.rank < world_size and 0 <= info.local_rank < local_world_size):
        raise UserError(
            f"RANK={info.rank} LOCAL_RANK={info.local_rank} do not fit WORLD_SIZE={world_size}"
        )
    return info


def setup_ddp(
    device: torch.device, ranks: RankInfo | None = None, store: dist.Store | None = None
) -> RankInfo:
    """Join the process group: NCCL for a CUDA device, gloo for the CPU. Does nothing for a single
    process.

    `store`: of ranks that have met already. `NCCL_TIMEOUT` limits a collective (seconds, default
    300). `INIT_TIMEOUT` limits the start of all ranks (seconds, default 900); after it the process
    exits with code 76. An existing group, such as Ray Train's, is used.
    """
    global _made_the_group
    ranks = ranks or read_rank_environment()
    if dist.is_initialized() or (ranks.world_size == 1 and "RANK" not in os.environ):
        return ranks
    is_one_machine = ranks.local_world_size == ranks.world_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif is_one_machine and Path("/sys/class/net/lo").exists():
        # Do not listen on a network interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    startup_s = startup_timeout_s()
    meeting = nullcontext(store) if store else Rendezvous(ranks.rank, is_one_machine, startup_s)
    with startup_watchdog(startup_s), meeting as place:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=place,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=collective_timeout_s()),
            device_id=device if device.type == "cuda" else None,
        )
        _made_the_group = True
        barrier()
    return ranks


def startup_timeout_s() -> float:
    """Return in how many seconds all ranks must meet, and then make their process group:
    `INIT_TIMEOUT`, default 900.
    """
    return _seconds_of("INIT_TIMEOUT", DEFAULT_STARTUP_TIMEOUT_S)


def collective_timeout_s() -> float:
    """Return the time limit of a collective in seconds: `NCCL_TIMEOUT`, default 300."""
    return _seconds_of("NCCL_TIMEOUT", DEFAULT_TIMEOUT_S)


def join_process_group(rank: int, world_size: int, backend: str | None = None) -> None:
    """Join the process group as `rank` of `world_size`, unless already in a group.

    The ranks meet at `MASTER_ADDR` and `MASTER_PORT`, by default port 29500 of this machine. The
    default `backend` is NCCL if there are several ranks and a GPU, else gloo. With NCCL the GPU of
    LOCAL_RANK becomes the current one; without that variable the ranks take the machine's GPUs in
    turn.
    """
    global _made_the_group
    if dist.is_initialized():
        return
    backend = backend or ("nccl" if torch.cuda.is_available() and world_size > 1 else "gloo")
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    if backend == "nccl" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    timeout = timedelta(seconds=collective_timeout_s())
    # A single rank needs no port.
    store = dist.HashStore() if world_size == 1 else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _made_the_group = True


def cleanup_ddp() -> None:
    """Leave the process group if `setup_ddp` or `join_process_group` made it."""
    global _made_the_group
    if _made_the_group and dist.is_initialized():
        dist.destroy_process_group()
    _made_the_group = False


def _seconds_of(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{variable}={text}: expected seconds, such as 1800")
    return seconds
