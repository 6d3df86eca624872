"""Memory and time of joining 300 instances on a photograph of 20 megapixels."""

import json
import resource
import time

import cv2
import numpy as np

from tests.predict.tile_scenes import made_up_piece
from tests.support.plugin import must_run
from yolo_seg_ddp.predict.merge_tiles import TileDetection, join_tiles
from yolo_seg_ddp.predict.overview import merge_coarse_level
from yolo_seg_ddp.predict.regions import Corners
from yolo_seg_ddp.predict.tiles import cut_tiles

SIZE = (5472, 3648)
NUM_WIRES, NUM_PARTS = 40, 260  # wires cross the whole photograph


def make_pieces(tiles: list[Corners]) -> list[TileDetection]:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, SIZE[1], (NUM_WIRES, 2))
    lines = [((0, int(a)), (SIZE[0], int(b)), 8, 0) for a, b in ends]
    starts = rng.integers(150, SIZE[1] - 150, (NUM_PARTS, 2))
    lines += [
        ((int(x), int(y)), (int(x + dx), int(y + dy)), 20, 1)
        for (x, y), (dx, dy) in zip(starts, rng.integers(-150, 150, (NUM_PARTS, 2)), strict=True)
    ]
    pieces = []
    for number, (left, top, right, bottom) in enumerate(tiles):
        for (x1, y1), (x2, y2), width, class_id in lines:
            part = np.zeros((bottom - top, right - left), np.uint8)
            cv2.line(part, (x1 - left, y1 - top), (x2 - left, y2 - top), 1, width)
            pieces += made_up_piece(
                number, class_id, float(rng.uniform(0.3, 0.9)), part.view(bool), left, top
            )
    return pieces


def measure() -> dict[str, float]:
    """Return the objects, the seconds of joining, and the process's growth in MB, all masks drawn
    one by one.
    """
    tiles = cut_tiles(*SIZE, 640)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = make_pieces(tiles)
    start = time.thread_time()
    objects = merge_coarse_level(join_tiles(pieces, tiles, 0.7), [], tiles, 640, 5472, 34.0)
    seconds = time.thread_time() - start
    largest = max(instance.region().mask.size for instance in objects)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "pieces": len(pieces),
        "objects": len(objects),
        "seconds": seconds,
        "mb": grown / 1024,
        "largest": largest,
    }


def test_300_instances_on_20_megapixels_take_little_memory_and_time() -> None:
    printed = must_run(
        "python", "-c", f"import json; from {__name__} import measure; print(json.dumps(measure()))"
    )
    found = json.loads(printed.splitlines()[-1])
    assert found["objects"] == NUM_WIRES + NUM_PARTS
    assert found["pieces"] > 3 * found["objects"]
    assert found["largest"] > 10e6  # a wire's bitmap: 300 of them would take 6 GB
    assert found["mb"] < 100
    assert found["seconds"] < 2


if __name__ == "__main__":
    print(json.dumps(measure()))
