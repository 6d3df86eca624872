"""A bar on the terminal while an epoch's batches are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from utils.engine.loop import TrainingEngine


class ProgressBar:
    """Shows a bar on a terminal while a loader's batches are used; every other attribute is the loader's."""

    def __init__(self, loader: Any, trainer: TrainingEngine) -> None:
        self.loader = loader
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        total, interval = len(self.loader), self.trainer.options.log_interval
        title = f"Epoch {self.trainer.progress.epoch + 1}/{self.trainer.options.epochs}"
        start = self.trainer.progress.batch if hasattr(self.loader, "set_epoch") else 0  # such a loader skips by itself
        disable = True if self.trainer.options.quiet else None  # None: shown on a terminal only
        with tqdm(initial=start, total=total, desc=title, disable=disable, leave=False, delay=0.5) as bar:
            for position, batch in enumerate(self.loader, start):
                bar.update()
                if position % interval == 0 or position + 1 == total:
                    bar.clear()  # the engine prints a line after this batch
                yield batch
