"""The trainer on a machine that claims more cores, so that it starts the loader processes it is told to."""

from __future__ import annotations

import train_yolo_ddp
from utils.common import cores
from utils.common.errors import run_script

CLAIMED_CORES = 64

if __name__ == "__main__":
    cores.usable_cpu_count = lambda *_: CLAIMED_CORES
    run_script(train_yolo_ddp.main)
