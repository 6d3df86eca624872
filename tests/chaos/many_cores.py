"""The trainer with a pretended number of cores, so that it starts as many loader processes as asked
for.
"""

import train_yolo_ddp
from yolo_seg_ddp.utils import cores
from yolo_seg_ddp.utils.errors import run_script

CLAIMED_CORES = 64

if __name__ == "__main__":
    cores.usable_cpu_count = lambda *_: CLAIMED_CORES
    run_script(train_yolo_ddp.main)
