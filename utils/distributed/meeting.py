"""What the ranks of a start tell each other before their process group exists, through the launcher's key-value store.

A collective has a time limit, and the work before a training may take an hour on one machine and none on another. So the
ranks meet first. Then each works in its own time, and who is done waits for the others as long as they live. A thread of
each rank counts upwards in the store. A rank whose number stands still for DEAD_AFTER_S is dead: all others then end, as
they do after an error of one rank.
"""

from __future__ import annotations

import glob
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
from typing import Self

import torch.distributed as dist

from utils.common.cores import read_words
from utils.common.errors import EXIT_FAILED, EXIT_KEYBOARD, EXIT_STARTUP_TIMEOUT, UserError, print_error
from utils.common.files import new_file
from utils.common.threads import BackgroundWatch
from utils.distributed.collectives import broadcast_from_main
from utils.distributed.process_group import RankInfo, Rendezvous, StartTimeout, startup_timeout_s

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines of one name
BEAT_S = 0.5
DEAD_AFTER_S = 60.0  # less with a smaller INIT_TIMEOUT
LEAVE_S = 3.0  # in which all ranks end after an error of one of them
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2
CHUNK = 2**22  # characters of a message: the store refuses 8 MiB


@contextmanager
def meet(ranks: RankInfo) -> Iterator[Meeting]:
    """Let all ranks meet within `INIT_TIMEOUT`; give them what they talk through until their process group exists.

    Every rank must reach this. After an error in the block on any rank all ranks end with its exit code, and the message of
    a UserError is printed once. Raises StartTimeout when a rank does not come.
    """
    timeout_s = startup_timeout_s()
    place: AbstractContextManager[dist.Store] = nullcontext(dist.HashStore())
    if ranks.world_size > 1 and dist.is_initialized():  # by another program, such as Ray Train
        name = broadcast_from_main(uuid.uuid4().hex)
        place = nullcontext(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))
    elif ranks.world_size > 1:
        place = Rendezvous(ranks.rank, ranks.local_world_size == ranks.world_size, timeout_s)
    with place as store, Meeting(ranks, store, timeout_s) as meeting:
        yield meeting


class Meeting(BackgroundWatch):
    """The ranks and machines of a start; see `meet`.

    `hosts` are the names of the machines, `first_ranks` the lowest rank of each, `machine` the number of this rank's one.
    """

    def __init__(self, ranks: RankInfo, store: dist.Store, timeout_s: float) -> None:
        super().__init__("meeting")
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.store, self.timeout_s = store, timeout_s
        self._exit_code: int | None = None  # of a rank that failed
        self._tokens: list[Path] = []

    def __enter__(self) -> Self:
        # Two launchers on one computer are two machines.
        launcher = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID", "")
        self.store.add(f"beat/{self.rank}", 1)
        self.tell("place", json.dumps([uuid.uuid4().hex, socket.gethostname(), *read_words(BOOT_ID), launcher]))
        self.wait("place", timeout_s=self.timeout_s)

        places = [json.loads(self.read("place", rank)) for rank in range(self.world_size)]
        self.name = places[0][0]  # of this start
        firsts = [next(rank for rank, other in enumerate(places) if other[1:] == place[1:]) for place in places]
        self.first_ranks = sorted(set(firsts))
        self.machines = [self.first_ranks.index(first) for first in firsts]
        self.machine = self.machines[self.rank]
        self.is_first = self.rank in self.first_ranks
        names = [places[first][1] for first in self.first_ranks]
        self.hosts = [
            name if names.count(name) == 1 else f"{name}/{number}" for number, name in enumerate(names, start=1)
        ]
        return super().__enter__() if self.world_size > 1 else self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__()
        for token in self._tokens:
            token.unlink(missing_ok=True)
        if error is None or self.world_size == 1:
            return
        codes = {SystemExit: self._exit_code, KeyboardInterrupt: EXIT_KEYBOARD}
        code = codes.get(type(error), getattr(error, "exit_code", EXIT_FAILED))
        # Without the store, on rank 0's machine, there is nobody to tell.
        with suppress(dist.DistError):
            if self._exit_code is None and self._is_first_failure(self.store, code, str(error)):
                # The store may end with this rank.
                with suppress(StartTimeout):
                    self.wait("left", set(range(self.world_size)) - {self.rank}, timeout_s=LEAVE_S)
            elif isinstance(error, UserError):
                raise SystemExit(self._learn_failure(self.store))

    def tell(self, kind: str, text: str = "") -> None:
        """Write this rank's message of a kind, once."""
        for start in range(0, len(text), CHUNK):
            self.store.append(f"text/{kind}/{self.rank}", text[start : start + CHUNK])
        self.store.set(f"{kind}/{self.rank}", "")

    def wait(self, kind: str, ranks: Iterable[int] | None = None, timeout_s: float = math.inf) -> None:
        """Wait until ranks, by default all, have told their message of a kind.

        Raises SystemExit when another rank fails or dies, and StartTimeout after `timeout_s`.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        try:
            while not self.store.check([f"{kind}/{rank}" for rank in ranks]):
                if self._exit_code is not None:
                    raise SystemExit(self._exit_code)
                if time.monotonic() > deadline_s:
                    missing = [str(rank) for rank in ranks if not self.store.check([f"{kind}/{rank}"])]
                    raise StartTimeout(
                        f"of {self.world_size} ranks {', '.join(missing)} did not start within {timeout_s:.0f} s; look at "
                        "their output, or wait longer: INIT_TIMEOUT=1800"
                    )
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        except dist.DistError as error:
            raise StartTimeout("the connection to rank 0's machine is lost; look at its output") from error

    def read(self, kind: str, rank: int) -> str:
        """Return the message that a rank has told."""
        return self.store.get(f"text/{kind}/{rank}").decode()

    def announce(self, text: str) -> None:
        """Print the progress of this rank's machine, with its name if there are several; only its first rank prints."""
        if self.is_first:
            start = f"{self.hosts[self.machine]}: " if len(self.hosts) > 1 else ""
            print(start + text.replace("\n", f"\n{start}"), flush=True)

    @contextmanager
    def first_on_machine(self) -> Iterator[None]:
        """Run the block on the first rank of each machine, then on the other ranks. Every rank must reach this."""
        if not self.is_first:
            self.wait("is through", [self.first_ranks[self.machine]])
        yield
        self.tell("is through")

    def sharers(self, folder: Path) -> tuple[int, int]:
        """Return this machine's number among those that have a folder in common, and how many they are.

        Every rank must reach this, once. A machine that cannot write into the folder shares it with none.
        """
        if len(self.hosts) == 1:
            return 0, 1
        stems = [folder / f"machine{number}" for number in range(len(self.hosts))]
        if self.is_first and not folder.is_symlink():
            with suppress(OSError):
                self.leave_token(stems[self.machine])
        self.tell("token")
        self.wait("token")

        if self.is_first:
            self.tell("sharers", json.dumps([number for number, stem in enumerate(stems) if self.sees_token(stem)]))
        # A machine that sees another's token late packs for itself.
        self.wait("sharers", self.first_ranks)
        seen = [json.loads(self.read("sharers", rank)) for rank in self.first_ranks]
        alike = [number for number, numbers in enumerate(seen) if numbers == seen[self.machine] != []]
        return (alike.index(self.machine), len(alike)) if alike else (0, 1)

    def leave_token(self, stem: Path) -> None:
        """Write a file beside `stem` that shows other machines that they share its folder; it goes when the meeting ends."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in stem.parent.glob(f".{glob.escape(stem.name)}.start-*"):
            left_by_a_kill.unlink(missing_ok=True)
        # A new name each time: what a network file system remembers of an earlier look does not count.
        self._tokens.append(self._token(stem))
        new_file(self._token(stem)).close()

    def sees_token(self, stem: Path) -> bool:
        """Return whether a machine has left its token beside `stem`, in a folder that this machine shares."""
        return self._token(stem).exists()

    def _token(self, stem: Path) -> Path:
        return stem.with_name(f".{stem.name}.start-{self.name}")

    def _is_first_failure(self, store: dist.Store, code: int, text: str) -> bool:
        """Note an error for all ranks, unless there is one."""
        if store.add("failures", 1) > 1:
            return False
        store.set("failure", json.dumps([code, self.machine, text]))
        return True

    def _learn_failure(self, store: dist.Store) -> int:
        """Return the exit code of the rank that failed first; on rank 0 print the message of another machine."""
        code, machine, text = json.loads(store.get("failure"))
        store.set(f"left/{self.rank}", "")
        if self.rank == 0 and machine != self.machine:
            print_error(f"{self.hosts[machine]}: {text}")
        return int(code)

    def _watch(self) -> None:
        # Without the store, on rank 0's machine, this rank ends where it next waits.
        with suppress(dist.DistError):
            self._watch_others(self.store.clone())  # on a shared connection a request could wait for another

    def _watch_others(self, store: dist.Store) -> None:
        # Rank 0 is a little earlier, so that it prints the message.
        limit_s = min(DEAD_AFTER_S, self.timeout_s) + 2 * BEAT_S * (self.rank > 0)
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        last: dict[int, tuple[bytes, float]] = {}
        while not self._is_over.wait(BEAT_S):
            store.add(keys[self.rank], 1)

            if store.check(["failure"]):
                self._exit_code = self._learn_failure(store)
                # The main thread leaves if it waits. It may also be at work for an hour.
                if not self._is_over.wait(LEAVE_S):
                    sys.stdout.flush()
                    os._exit(self._exit_code)
                return

            now_s = time.monotonic()
            for rank, beat in enumerate(store.multi_get(keys)):
                if rank not in last or last[rank][0] != beat:
                    last[rank] = (beat, now_s)
                elif now_s - last[rank][1] > limit_s:
                    text = (
                        f"rank {rank} on {self.hosts[self.machines[rank]]} gave no sign of life for {limit_s:.0f} s: it died or "
                        "hangs, see its output; all ranks end, and --max-restarts of the launcher starts them again"
                    )
                    if self._is_first_failure(store, EXIT_STARTUP_TIMEOUT, text):
                        print_error(text)
                    break
