"""Regions to ignore: their files, and that they move with the picture and change nothing else."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import COLOURLESS, PICTURES, SIZE_PX, Pictures, box, dataset_of, samples_of
from tests.data.test_windows import MANY, windows_of
from utils.common.errors import DataErrors
from utils.data.dataset import Batch, Photo, Sample, collate, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.labels import ANY_CLASS

VIEWS: dict[str, dict[str, Any]] = {
    "flips and rotation": {"degrees": 30.0, "flipud": 0.5, "mosaic": 0.0},
    "mosaic": {"mosaic": 1.0, "scale": 0.9},
    "mixup": {"mixup": 1.0},
    "mirrored copies": {"copy_paste": 1.0},
    "pasted objects": {"paste": 1.0, "wire_classes": (2,)},
    "drawn wires": {"draw_wires": 1.0, "wire_classes": (2,)},
}


def doubled(photo: Photo, class_ids: np.ndarray) -> Photo:
    """Return a photograph with a region of the same outline for each object."""
    return dataclasses.replace(photo, ignored_ids=class_ids, ignored=photo.polygons)


def placed(class_ids: np.ndarray, outlines: list[np.ndarray]) -> set[tuple[int, bytes]]:
    return {(k, outline.tobytes()) for k, outline in zip(class_ids.tolist(), outlines, strict=True)}


def with_regions() -> Pictures:
    pictures = copy.copy(PICTURES)
    pictures.photos = [doubled(photo, photo.class_ids) for photo in PICTURES.photos]
    return pictures


@pytest.mark.parametrize("name", VIEWS)
def test_regions_move_with_the_objects_of_the_same_outline_and_change_nothing_else(name: str) -> None:
    config = dataclasses.replace(COLOURLESS, **VIEWS[name])
    plain = samples_of(config)
    for now, before in zip(samples_of(config, pictures=with_regions()), plain, strict=True):
        assert placed(now.class_ids, now.polygons) == placed(before.class_ids, before.polygons)
        assert np.array_equal(np.maximum(now.masks, 0), before.masks)
        assert name == "drawn wires" or np.array_equal(now.image, before.image)  # bars are not drawn over regions
        regions = placed(now.ignored_ids, now.ignored)
        if name in list(VIEWS)[:3]:
            assert regions >= placed(now.class_ids, now.polygons)
        else:
            assert len(regions) <= 4 * len(PICTURES.photos[0].polygons), "no region is pasted"
            assert not len(before.ignored)
    assert any(len(sample.polygons) for sample in plain)


def test_a_window_keeps_every_piece_of_a_region() -> None:
    photos = [doubled(photo, photo.class_ids) for photo, _ in MANY]
    windows = windows_of(photos, [size for _, size in MANY], 4)
    more = 0
    for index in range(len(windows)):
        shown = windows.labels(windows.window(0, index))
        objects, regions = placed(shown.class_ids, shown.polygons), placed(shown.ignored_ids, shown.ignored)
        assert objects <= regions
        more += len(regions) - len(objects)
    assert more > 0, "pieces too small to be objects"


def sample_with(*regions: tuple[int, np.ndarray], epoch: int = 0) -> Sample:
    """Return the letterboxed sample of a picture with an object and these regions."""
    pictures = Pictures(1, (SIZE_PX, SIZE_PX))
    photo = dataclasses.replace(pictures.photos[0], class_ids=np.array([1]), polygons=[box(0.5, 0.5, 0.25, 0.25)])
    regions_ids = np.array([class_id for class_id, _ in regions], np.int64)
    pictures.photos = [dataclasses.replace(photo, ignored_ids=regions_ids, ignored=[outline for _, outline in regions])]
    return dataset_of(None, pictures)[epoch, 0]


def test_a_batch_has_a_map_for_each_image_and_class_below_its_objects() -> None:
    regions = [(ANY_CLASS, box(0.5, 0, 0.5, 1)), (2, box(0, 0, 0.25, 0.25)), (2, box(0, 0.75, 0.25, 0.25))]
    batch = collate([sample_with(), sample_with(*regions)])
    assert batch.ignored is not None
    assert batch.ignored_of is not None
    assert batch.ignored_of.tolist() == [[1, 1], [ANY_CLASS, 2]]
    assert np.argwhere(batch.ignored[0].numpy()).min(0).tolist() == [0, 16]
    assert batch.ignored.sum((1, 2)).tolist() == [16 * 32, 2 * 8 * 8]
    assert np.unique(batch.masks[1], return_counts=True)[1].tolist() == [16 * 32 + 128 - 64, 384, 64], (
        "the object is on top"
    )
    assert batch.masks[0].min() == 0
    sent: Batch = pickle.loads(pickle.dumps(batch))  # noqa: S301 # our own
    assert sent.ignored is not None
    assert sent.ignored.equal(batch.ignored)
    assert np.array_equal(sent.samples[1].ignored_ids, [ANY_CLASS, 2, 2])
    assert collate([sample_with()]).ignored is None


def test_regions_are_read_from_the_folder_beside_the_labels(tmp_path: Path) -> None:
    for file, text in {
        "data.yaml": "train: train/images\nval: flat\nnames: [wire, pole]\n",
        "train/images/a.jpg": "",
        "train/images/b.jpg": "",
        "train/labels/a.txt": "1 0.5 0.5 0.2 0.2\n",
        "train/ignore/a.txt": "\n-1 0.5 0.5 0.5 0.5\n1 0 0 1 0 1 1\n",
        "flat/c.jpg": "",
        "flat/c.txt": "1 0.5 0.5 0.2 0.2\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    spec = load_dataset_yaml(tmp_path / "data.yaml")
    one, other = read_photos(spec, "train")
    assert one.ignored_ids.tolist() == [ANY_CLASS, 1]
    np.testing.assert_allclose(one.ignored[0][0], 0.25)
    assert one.class_ids.tolist() == [1]
    assert not other.ignored
    assert not read_photos(spec, "val")[0].ignored, "labels beside the photographs are no regions"
    (tmp_path / "train/ignore/b.txt").write_text("0 0.5 0.5 0.5 0.5\n-2 0.5 0.5 0.5 0.5\n")
    with pytest.raises(DataErrors, match=r"ignore/b\.txt:2: class -2 is not one of -1\.\.1"):
        read_photos(spec, "train")
    (tmp_path / "train/ignore/b.txt").unlink()
    (tmp_path / "train/ignore/b.txt").symlink_to("/etc/hostname")
    with pytest.raises(DataErrors, match="is a link that leaves it"):
        read_photos(spec, "train")
