"""Photographs in memory, in the place of the packed cache."""

import numpy as np


class InMemory:
    """Reads as `yolo_seg_ddp.data.packed_images.PackedImages` does, from what `whole` returns."""

    def whole(self, position: int) -> np.ndarray:
        """Return photograph `position` as RGB uint8 (H, W, 3)."""
        raise NotImplementedError

    def shape(self, position: int) -> tuple[int, int]:
        height, width = self.whole(position).shape[:2]
        return height, width

    def read(self, position: int, rows: range | None = None) -> np.ndarray:
        image = self.whole(position)
        return image if rows is None else image[rows.start : rows.stop]
