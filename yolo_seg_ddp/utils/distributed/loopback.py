"""torchrun that ends with the ranks' own line about a user's error, and that needs no port that the
network can reach.

    python -m yolo_seg_ddp.utils.distributed.loopback --rdzv-backend loopback \\
        --rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2 train_yolo_ddp.py

PyTorch's key-value store listens on every interface, without a password: anybody who reaches it can
change the addresses that the ranks connect to. This rendezvous opens the same store on the loopback
interface alone.
"""

import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import elastic_launch

from yolo_seg_ddp.utils.distributed.process_group import LOOPBACK
from yolo_seg_ddp.utils.errors import SAID

BACKEND = "loopback"


class LoopbackBackend(C10dRendezvousBackend):
    """c10d under the name by which the registry looks it up."""

    @property
    def name(self) -> str:
        return BACKEND


def create_loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Open the store on this machine's loopback interface, at the endpoint's port (0: any free
    one).
    """
    listener = socket.create_server((LOOPBACK, int(parameters.endpoint.rpartition(":")[2])))
    store = dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return create_handler(store, LoopbackBackend(store, parameters.run_id), parameters)


class Launch(elastic_launch):
    """Starts the ranks, without torchrun's report where a rank has said what the user can do
    (`print_error`).
    """

    def __call__(self, *words: Any) -> Any:
        """Return what the ranks return; exit with 1 after an explained error or a signal to this
        process.
        """
        logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        logger.addFilter(lambda record: not self._is_explained())
        try:
            return super().__call__(*words)
        # the ranks have ended and said so; torchrun would add 25 lines of its own stack
        except SignalException:
            sys.exit(1)
        except ChildFailedError as error:
            # torchrun itself ends the other ranks with SIGTERM.
            codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}
            if min(codes, default=-1) < 0 or not self._is_explained():
                raise
            sys.exit(1)

    def _is_explained(self) -> bool:
        """Return whether a rank of the newest start has printed a user's error."""
        logs = self._config.logs_specs
        # torchrun always sets it.
        assert logs is not None
        starts = Path(logs.root_log_dir).glob(f"{self._config.run_id}_*/attempt_*")
        return any(max(starts, key=os.path.getmtime, default=Path()).glob(f"{SAID}*"))


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, create_loopback_rendezvous)
    run.elastic_launch = Launch  # type: ignore[misc]
    run.main()


if __name__ == "__main__":
    main()
