"""The multi-node lines of the recipes' guides, as typed, on two virtual machines (chaos/namespaces.py).

python -m chaos.recipes
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from chaos.machines import PROJECT, require
from chaos.namespaces import NAMES, TIMEOUT_S, reason_to_skip, two_machines
from chaos.report import print_report, run_trials

CROWD = PROJECT / "recipes" / "crowd_bt"
SMALL = ("--backbone", "test_resnet", "--no-pretrained", "--input-size", "32", "--epochs", "1", "--device", "cpu")
MAKE = ("--size", "32", "--num-pictures", "42", "--num-unseen", "14", "--comparisons", "60", "--per-annotator", "10")


def crowd_bt() -> dict[str, Any]:
    """Train the quality scorer by its guide's two torchrun lines, with one process instead of four on each machine."""
    with two_machines() as machines:
        photographs, data, run = (machines.folder / name for name in ("photographs", "data", "run"))
        photographs.mkdir()
        for number in range(2):
            tiles = np.random.default_rng(number).integers(0, 255, (24, 24, 3)).astype(np.uint8)
            cv2.imwrite(str(photographs / f"{number}.png"), np.kron(tiles, np.ones((8, 8, 1), np.uint8)))
        made = [sys.executable, str(CROWD / "make_data.py"), "--images", str(photographs), "--output", str(data), *MAKE]
        machines.finish(machines.start(0, made))
        places = ("--data-dir", data, "--image-dir", data / "images", "--checkpoint-dir", run)
        training = [machines.start(number, guide_line(number, places)) for number in (0, 1)]
        for process in training:
            machines.finish(process, 2 * TIMEOUT_S)
        first, second = ((machines.folder / f"log{number}").read_text() for number in (0, 1))
        require("Distributed training initialized with 2 processes" in first, f"no group of two: {first[-1500:]}")
        require("Val Loss" in first and "Val Loss" not in second, "rank 0 of the first machine alone must print")
        result = json.loads((run / "evaluation_results.json").read_text(encoding="utf-8"))
        return {"validation pairs": result["total"]}


def guide_line(machine: int, places: tuple[str | Path, ...]) -> list[str]:
    """Return the guide's command for one of two machines."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=2"]
    meeting = [f"--node_rank={machine}", f"--master_addr={NAMES[0]}", "--master_port=29500"]
    trainer = [str(CROWD / "train.py"), "--distributed", "--world-size", "2", *SMALL]
    return [*torchrun, *meeting, *trainer, *map(str, places)]


def run(trials: int = 1) -> dict[str, Any]:
    """Run each recipe's lines `trials` times; return the report of `run_trials`."""
    trial_of = {"R27 crowd_bt": crowd_bt}
    return run_trials("R27", "recipes' multi-node lines on two machines", trials, trial_of, reason_to_skip())


if __name__ == "__main__":
    sys.exit(print_report(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
