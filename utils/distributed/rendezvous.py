"""A rendezvous of ranks that is safe after a restart.

The launcher's key-value store outlives a restart of the ranks and keeps the addresses of the dead ones. A new rank that
reads such an address waits for a process that no longer exists. So each rank writes a random token under the next
number of a counter and waits for the answer to this token, which only a living rank 0 gives. Rank 0 answers with a
random name of this start, and the process group uses only keys below that name.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from utils.common.errors import EXIT_STARTUP_TIMEOUT, UserError

COUNTER = "rendezvous/counter"
POLL_S = 0.05
LOOPBACK = "127.0.0.1"


class Rendezvous:
    """`with Rendezvous(...) as store:` gives a store whose keys only the ranks of this start use.

    Rank 0 answers until the block ends, so every rank must have joined the group before. With `is_one_machine` a store
    that rank 0 itself opens listens on the loopback interface only. Raises UserError when the store is not reachable,
    or rank 0 does not answer, within `timeout_s`.
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
            self._host = threading.Thread(target=self._answer, args=(self._open(is_host=False), name), daemon=True)
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
            raise UserError(f"MASTER_ADDR={self.address} MASTER_PORT={self.port}: {reason}") from error

    def _ask(self, store: dist.Store) -> str:
        token = uuid.uuid4().hex
        store.set(f"rendezvous/token/{store.add(COUNTER, 1)}", token)
        answer = f"rendezvous/answer/{token}"
        deadline_s = time.monotonic() + self.timeout_s
        while not store.check([answer]):
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"rank {self.rank}: rank 0 did not answer within {self.timeout_s:.0f} s; "
                    f"did it start, and can every machine reach {self.address}:{self.port}?"
                )
            time.sleep(POLL_S)
        return store.get(answer).decode()

    def _answer(self, store: dist.Store, name: str) -> None:
        """Answer every token, also those of dead ranks, which nobody reads."""
        seen, waiting = 0, set[int]()
        while not self._is_over.wait(POLL_S):
            count = store.add(COUNTER, 0)
            waiting |= set(range(seen + 1, count + 1))
            seen = count
            # A number may have no token yet: its rank is about to write it, or has died.
            for number in [number for number in waiting if store.check([f"rendezvous/token/{number}"])]:
                store.set(f"rendezvous/answer/{store.get(f'rendezvous/token/{number}').decode()}", name)
                waiting.remove(number)


@contextmanager
def startup_watchdog(timeout_s: float) -> Iterator[None]:
    """Print the stacks of all threads and exit with code 76 when the block takes longer than `timeout_s`.

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
    rank = os.environ.get("RANK", "0")
    print(
        f"[rank {rank}] error: not all ranks joined within {timeout_s:.0f} s; stacks of all threads:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(EXIT_STARTUP_TIMEOUT)
