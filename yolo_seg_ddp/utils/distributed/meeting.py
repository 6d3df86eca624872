"""What the ranks of a start tell each other before their process group exists, through the
launcher's key-value store.

A collective has a time limit, and the work before a training may take an hour on one machine and
none on another. So the ranks meet first. Then each works in its own time, and who is done waits for
the others as long as they live. A thread of each rank counts upwards in the store. A rank whose
number stands still for DEAD_AFTER_S is dead: all others then end, as they do after an error of one
rank.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

from yolo_seg_ddp.utils.cores import read_words
from yolo_seg_ddp.utils.distributed.collectives import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    broadcast_from_main,
    rank,
    world_size,
)
from yolo_seg_ddp.utils.distributed.process_group import (
    RankInfo,
    Rendezvous,
    StartTimeout,
    startup_timeout_s,
)
from yolo_seg_ddp.utils.errors import (
    EXIT_FAILED,
    EXIT_STARTUP_TIMEOUT,
    UserError,
    one_line,
    print_error,
)
from yolo_seg_ddp.utils.files import new_file
from yolo_seg_ddp.utils.threads import BackgroundWatch

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines of one name
BEAT_S = 0.5
DEAD_AFTER_S = 60.0  # less with a smaller INIT_TIMEOUT
LEAVE_S = 2.0  # after the error of another rank, which needs the time to print it


@contextmanager
def meet(ranks: RankInfo) -> Iterator[Meeting]:
    """Let all ranks meet within `INIT_TIMEOUT`; give them what they talk through until their
    process group exists.

    Every rank must reach this. After an error in the block on any rank all ranks end with its exit
    code. Its rank prints it, and rank 0 if that is on another machine; of several errors the first.
    Raises StartTimeout when a rank does not come.
    """
    timeout_s = startup_timeout_s()
    place: AbstractContextManager[dist.Store] = nullcontext(dist.HashStore())
    # Then another program made the group, such as Ray Train.
    if ranks.world_size > 1 and dist.is_initialized():
        name = broadcast_from_main(uuid.uuid4().hex)
        place = nullcontext(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
    elif ranks.world_size > 1:
        place = Rendezvous(ranks.rank, ranks.local_world_size == ranks.world_size, timeout_s)
    with place as store, Meeting(ranks, store, timeout_s) as meeting:
        yield meeting


def apart(items: Iterable[T]) -> Iterator[T]:
    """Yield what this rank works on alone; then wait for all others, without a limit as long as
    they live.

    Every rank must reach this. The ranks may be hours apart then, and the next collective has a
    time limit.
    """
    with meet(RankInfo(rank(), world_size=world_size())) as meeting:
        yield from items
        meeting.exchange("done")


class Meeting(BackgroundWatch):
    """The ranks and machines of a start; see `meet`.

    `machines` has the number of each rank's machine, `hosts` the names of the machines, and
    `first_ranks` their lowest ranks.
    """

    def __init__(self, ranks: RankInfo, store: dist.Store, timeout_s: float) -> None:
        super().__init__("meeting")
        self.rank = ranks.rank
        self.ranks = range(ranks.world_size)
        self.store = store
        self.timeout_s = timeout_s
        self._exit_code: int | None = None  # of another rank, which failed

        # Two launchers on one computer are two machines.
        launcher = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID", "")
        machine = " ".join([socket.gethostname(), *read_words(BOOT_ID), launcher])
        store.add(f"beat/{self.rank}", 1)
        places = self.exchange("place", [machine, uuid.uuid4().hex], timeout_s)

        names = [machine for machine, _ in places]
        self.first_ranks = sorted(set(map(names.index, names)))
        self.machines = [self.first_ranks.index(names.index(name)) for name in names]
        self.machine = self.machines[self.rank]
        self.is_first = self.rank in self.first_ranks
        hosts = [names[rank].split()[0] for rank in self.first_ranks]
        self.hosts = [
            f"{host}/{number}" if hosts.count(host) > 1 else host
            for number, host in enumerate(hosts, 1)
        ]
        self.name = places[0][1]

    def __enter__(self) -> Self:
        return super().__enter__() if len(self.ranks) > 1 else self

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        error = raised[1]
        if (
            not isinstance(error, BaseException)
            or len(self.ranks) == 1
            or self._exit_code is not None
        ):
            return
        # Of ranks that fail alike rank 0 prints why. Without the store, on its machine, there is
        # nobody to tell.
        time.sleep(BEAT_S * (self.rank > 0))
        with suppress(dist.DistError):
            if self._is_first_failure(
                self.store, getattr(error, "exit_code", EXIT_FAILED), one_line(error, 1000)
            ):
                # The store may end with this rank.
                time.sleep(2 * BEAT_S)
            elif isinstance(error, UserError):
                self._learn_failure(self.store)
                time.sleep(LEAVE_S)
                raise SystemExit(self._exit_code)

    def wait(self, keys: list[str], timeout_s: float = math.inf) -> None:
        """Wait until the store has all keys.

        Raises SystemExit when another rank fails or dies, StartTimeout after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        try:
            while not self.store.check(keys):
                if self._exit_code is not None:
                    time.sleep(LEAVE_S)
                    raise SystemExit(self._exit_code)
                if time.monotonic() > deadline_s:
                    missing = [key.partition("/")[2] for key in keys if not self.store.check([key])]
                    raise StartTimeout(
                        f"of {len(self.ranks)} ranks {', '.join(missing)} did not start within "
                        f"{timeout_s:.0f} s; look at "
                        "their output, or wait longer: INIT_TIMEOUT=1800"
                    )
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        except dist.DistError as error:
            raise StartTimeout(
                "the connection to rank 0's machine is lost; look at its output"
            ) from error

    def exchange(self, kind: str, message: Any = None, timeout_s: float = math.inf) -> list[Any]:
        """Return the messages of all ranks, which are JSON, in rank order.

        Every rank must reach this once for each kind.
        """
        keys = [f"{kind}/{rank}" for rank in self.ranks]
        self.store.set(keys[self.rank], json.dumps(message))
        self.wait(keys, timeout_s)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    @contextmanager
    def first_on_machine(self) -> Iterator[None]:
        """Run the block on the first rank of each machine, then on its other ranks.

        Every rank must reach this.
        """
        if not self.is_first:
            self.wait([f"done/{self.first_ranks[self.machine]}"])
        yield
        self.store.set(f"done/{self.rank}", "")

    def announce(self, text: str) -> None:
        """Print the progress of this rank's machine, with its name if there are several; only its
        first rank prints.
        """
        if self.is_first:
            start = f"{self.hosts[self.machine]}: " if len(self.hosts) > 1 else ""
            print(start + text.replace("\n", f"\n{start}"), flush=True)

    def sharers(self, kind: str, folder: Path, wait_s: float = 0) -> list[int]:
        """Return the machines that have a folder in common with this one. Every rank must reach
        this once for each kind.

        `wait_s`: for how long a file of the first machine may not show. Who cannot write into the
        folder shares it with none.
        """
        if len(self.hosts) == 1:
            return [0]
        # A new name each time: no machine can remember that it did not exist.
        tokens = [folder / f".start-{self.name}-{machine}" for machine in range(len(self.hosts))]
        try:
            if self.is_first and not folder.is_symlink():
                with suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                    new_file(tokens[self.machine]).close()
            self.exchange(f"{kind} token")
            deadline_s = time.monotonic() + wait_s
            while not tokens[0].exists() and time.monotonic() < deadline_s:
                time.sleep(LONGEST_PAUSE_S)
            seen = [machine for machine, token in enumerate(tokens) if token.exists()]
            lowest = self.exchange(kind, min(seen, default=self.machine))
        finally:
            if self.is_first:
                tokens[self.machine].unlink(missing_ok=True)
        groups = [lowest[rank] for rank in self.first_ranks]
        return [machine for machine, group in enumerate(groups) if group == groups[self.machine]]

    def _is_first_failure(self, store: dist.Store, code: int, text: str) -> bool:
        """Note an error for all ranks, unless there is one."""
        if store.add("failures", 1) > 1:
            return False
        store.set("failure", json.dumps([code, self.machine, text]))
        return True

    def _learn_failure(self, store: dist.Store) -> None:
        """Take the exit code of the rank that failed first; on rank 0 print the message of another
        machine.
        """
        self._exit_code, machine, text = json.loads(store.get("failure"))
        if self.rank == 0 and machine != self.machine:
            print_error(f"{self.hosts[machine]}: {text}")

    def _watch(self) -> None:
        # Rank 0 is a little earlier, so that it prints the message.
        limit_s = min(DEAD_AFTER_S, self.timeout_s) + 2 * BEAT_S * (self.rank > 0)
        keys = [f"beat/{rank}" for rank in self.ranks]
        last = [(b"", 0.0)] * len(keys)
        # Without the store, on rank 0's machine, this rank ends where it next waits.
        with suppress(dist.DistError):
            # On a shared connection a request could wait for another.
            store = self.store.clone()
            while not self._is_over.wait(BEAT_S):
                store.add(keys[self.rank], 1)
                if store.check(["failure"]):
                    self._learn_failure(store)
                    # The main thread leaves if it waits. It may also be at work for an hour.
                    if not self._is_over.wait(2 * LEAVE_S):
                        sys.stdout.flush()
                        os._exit(self._exit_code or EXIT_FAILED)
                    return

                now_s = time.monotonic()
                beats = store.multi_get(keys)
                last = [
                    (beat, now_s) if beat != old[0] else old
                    for beat, old in zip(beats, last, strict=True)
                ]
                oldest_s, rank = min((beat_s, rank) for rank, (_, beat_s) in enumerate(last))
                text = (
                    f"rank {rank} on {self.hosts[self.machines[rank]]} gave no sign of life for "
                    f"{limit_s:.0f} s: it died or hangs, see its output; all ranks end, and with "
                    "--max-restarts the launcher starts them again"
                )
                if now_s - oldest_s > limit_s and self._is_first_failure(
                    store, EXIT_STARTUP_TIMEOUT, text
                ):
                    print_error(text)
