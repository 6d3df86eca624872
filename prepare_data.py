"""Pack the photographs for a training, and take their digests. Needs no GPU and does not read the
model.

    python prepare_data.py --data data/processed/dataset.yaml --img-size 640
    python prepare_data.py --config training.yaml --cache-dir /fast/packed
    srun --nodes=4 --ntasks-per-node=1 python prepare_data.py --data /shared/data/dataset.yaml

The options are those of train_yolo_ddp.py; a training with the same ones then reads no photograph
and packs none. The same command again continues what was interrupted. Machines that share the
folder share the work.
"""

from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import parse_config, show_help

if __name__ == "__main__":
    show_help(TrainConfig, __doc__)

# --- the command, which needs PyTorch

import socket
import sys
import time
from dataclasses import replace

import torch

from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.run.folder import resume_arguments, without_local_rank
from yolo_seg_ddp.training.data import open_data
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import EXIT_DONE, run_script
from yolo_seg_ddp.utils.text import next_command


def main() -> int:
    """Pack this process's share; return the exit code. Raises UserError if the disk has no room."""
    arguments = without_local_rank(sys.argv[1:])
    config = parse_config(TrainConfig, __doc__, resume_arguments(arguments))
    # A training may do without a cache; here it is the purpose.
    if config.cache == "auto":
        config = replace(config, cache="packed")
    # Each process packs by itself.
    ranks = distributed.read_rank_environment(will_meet=False)
    host = f"{socket.gethostname()}: " if ranks.world_size > 1 else ""

    def say(text: str) -> None:
        print(f"{host}{text}", flush=True)

    start_s = time.monotonic()
    spec = load_dataset_yaml(
        config.data, trust_links=config.trust_links, cache_dir=config.cache_dir
    )
    data = open_data(config, spec, torch.device("cpu"), say, (ranks.rank, ranks.world_size))
    say(
        f"{data.packed}, digest {data.fingerprint.digest}: ready after "
        f"{time.monotonic() - start_s:.1f} s"
    )
    if ranks.is_main:
        print(next_command("python", "train_yolo_ddp.py", *arguments))
    return EXIT_DONE


if __name__ == "__main__":
    run_script(main)
