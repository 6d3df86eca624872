"""The cores that loading needs, measured while a training runs."""

import statistics
import time
from contextlib import suppress
from typing import Any

import psutil

from yolo_seg_ddp.utils.cores import usable_cpu_count

# Share of the time that a GPU waits for photographs, from which on more cores are worth a line.
MUCH_WAIT = 0.1
# Batches, and rounds of all workers, over which a photograph's cost is measured: workers deliver in
# bursts.
FEWEST_BATCHES = 20
FEWEST_ROUNDS = 2


class LoaderCost:
    """Measures the processor time of a loaded photograph, and says once when the GPUs need more
    cores than there are.

    `workers` load for this process, in batches of `batch_size`; `processes` such processes share
    the machine, each with a GPU.
    """

    def __init__(self, workers: int, batch_size: int, processes: int) -> None:
        self.workers = workers
        self.batch_size = batch_size
        self.processes = processes
        # Without workers the process loads by itself.
        self._is_told = not workers
        self._begun: tuple[int, int, float, float] | None = (
            None  # epoch, batch, seconds, processor seconds of the workers
        )
        self._waits: list[float] = []

    def line(self, record: dict[str, Any]) -> str:
        """Return the line after a logged batch, whose line of metrics.jsonl is `record`, or an
        empty string.
        """
        epoch, batch = record["epoch"], record["batch"]
        # An epoch's first batch waits for the workers to start.
        if self._is_told or batch == 0:
            return ""
        now_s = time.perf_counter()
        processor_s = worker_processor_s()
        if self._begun is None or self._begun[0] != epoch:
            self._begun = (epoch, batch, now_s, processor_s)
            self._waits = []
            return ""

        # The others wait in the gradients' all-reduce for the rank that waits longest for its
        # batch.
        self._waits.append(max(record["ranks"]["data_wait_share"]))
        batches = batch - self._begun[1]
        if batches < max(FEWEST_BATCHES, FEWEST_ROUNDS * self.workers):
            return ""
        wait = statistics.fmean(self._waits)
        images = batches * self.batch_size
        images_per_s = images / (now_s - self._begun[2]) / max(1 - wait, 0.01)
        image_s = (processor_s - self._begun[3]) / images
        self._begun = None

        # One core more for each process, which feeds its GPU.
        cores = round(self.processes * (images_per_s * image_s + 1))
        available = usable_cpu_count()
        if wait < MUCH_WAIT or cores <= available:
            return ""
        self._is_told = True
        gpus = f"{self.processes} GPUs need" if self.processes > 1 else "A GPU needs"
        return (
            f"  {gpus} about {cores} cores for {images_per_s:.0f} images/s each; this machine has "
            f"{available}, so {wait:.0%} of the time waits for photographs"
        )


def worker_processor_s() -> float:
    """Return the processor time that this process's children have used so far."""
    total_s = 0.0
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total_s += times.user + times.system
    return total_s
