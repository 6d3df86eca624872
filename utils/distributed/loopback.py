"""torchrun for one machine, without any port that the network can reach.

    python -m utils.distributed.loopback --rdzv-backend loopback --rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2 train_yolo_ddp.py

PyTorch's key-value store listens on every interface, without a password: anybody who reaches it can change the addresses
that the ranks connect to. This rendezvous opens the same store on the loopback interface alone.
"""

import socket
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from utils.distributed.process_group import LOOPBACK

BACKEND = "loopback"


class LoopbackBackend(C10dRendezvousBackend):
    """c10d under the name by which the registry looks it up."""

    @property
    def name(self) -> str:
        return BACKEND


def create_loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Open the store on this machine's loopback interface, at the endpoint's port (0: any free one)."""
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


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, create_loopback_rendezvous)
    try:
        run.main()
    except SignalException:  # the ranks have ended and said so; torchrun would add 25 lines of its own stack
        sys.exit(1)


if __name__ == "__main__":
    main()
