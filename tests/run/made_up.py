"""The files of a made-up run, for the tests that read or show them."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NOW_S = 1_800_000_000.0


def batch(epoch: int, number: int, **facts: Any) -> dict[str, Any]:
    step = (epoch - 1) * 20 + number + 1
    speeds = {"images_per_s": 27.34, "step_ms": 500.0, "data_wait_share": 0.04}
    place = {
        "epoch": epoch,
        "batch": number,
        "global_step": step,
        "num_batches": 20,
        "time_s": NOW_S + step,
    }
    return {
        "kind": "batch",
        **place,
        "loss": 10.0 / step,
        "seg": 5.0 / step,
        **speeds,
        "slow_rank": None,
        **facts,
    }


def epoch_record(epoch: int) -> dict[str, Any]:
    measures = {
        "train_loss": 3.0 / epoch,
        "val_loss": 2.0 + abs(epoch - 2),
        "mask_map50_95": 0.1 * epoch,
    }
    return {
        "kind": "epoch",
        "epoch": epoch,
        "global_step": 20 * epoch,
        "total_epoch_time_s": 12.0,
        **measures,
    }


def write_run(
    folder: Path, records: list[dict[str, Any]], state: str = "running", **status: Any
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text(
        "model: yolov8n-seg.yaml\nepochs: 4\nimg_size: 96\nbatch_size: 4\nseed: 7\n"
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {
        "state": state,
        "reason": "",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "updated": now,
        **status,
    }
    (folder / "status.json").write_text(json.dumps(facts))


RANKS = {
    "own_ms": [152.0, 240.0, 150.0],
    "data_wait_share": [0.02, 0.3, 0.02],
    "cpu_cores": [1.0, 1.0, 1.0],
    "rss_bytes": [1e9, 1e9, 1e9],
    "gpu_util": [0.93, 0.91, 0.92],
    "gpu_memory_bytes": [9e9, 9e9, 9e9],
    "gpu_power_w": [300.0, 280.0, None],
    "gpu_temperature_c": [61.0, 60.0, 75.0],
    "gpu_clock_mhz": [1410.0, 1200.0, 1410.0],
}
