"""Colour by the loader and by the device: equal gains, nearly equal pixels."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.data.pictures import COLOURLESS
from tests.yolo.conftest import Operators
from yolo_seg_ddp.data.augment import Augmentation, draw_gains, jitter_colour, sample_generator
from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset, collate
from yolo_seg_ddp.yolo.inputs import jitter_colours, prepare_batch

CPU = torch.device("cpu")


def gains_of(index: int, config: Augmentation | None = None) -> np.ndarray:
    return draw_gains(config or Augmentation(), sample_generator(0, 0, index))


def test_without_strength_colours_stay_and_with_it_they_change() -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    assert jitter_colour(image, gains_of(0, COLOURLESS)) is image
    changed = jitter_colour(image, gains_of(0))
    assert (changed.shape, changed.dtype) == (image.shape, image.dtype)
    assert not np.array_equal(changed, image)
    red = np.full((2, 2, 3), (200, 30, 30), np.uint8)
    assert all(
        (jitter_colour(red, gains_of(index)).argmax(-1) == 0).all() for index in range(20)
    ), "still reddish"


@pytest.mark.parametrize("gains", [(1.015, 1.7, 0.6), (0.985, 0.3, 1.4), (1.6, 1.2, 1.0)])
def test_every_level_is_multiplied_rounded_and_stopped_and_hue_is_a_circle(
    gains: tuple[float, ...],
) -> None:
    hue, saturation, value = np.meshgrid(
        np.arange(0, 180, 7), np.arange(0, 256, 15), np.arange(0, 256, 15)
    )
    hsv = np.stack([hue, saturation, value], -1).reshape(1, -1, 3).astype(np.uint8)
    image = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    seen = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(float) * gains
    wanted = np.stack(
        [np.rint(seen[..., 0]) % 180, seen[..., 1].clip(max=255), seen[..., 2].clip(max=255)], -1
    )
    if gains[0] > 1.5:
        wanted[..., 0] = np.floor(seen[..., 0] % 180)
    wanted_image = cv2.cvtColor(np.rint(wanted).astype(np.uint8), cv2.COLOR_HSV2RGB)
    gap = np.abs(jitter_colour(image, np.array(gains)).astype(int) - wanted_image.astype(int))
    assert gap.max() <= 2  # what the conversion back rounds otherwise at a hue of 180 and one of 0


def on_device(images: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return uint8 (B, H, W, 3) as the device makes it of uint8 (B, H, W, 3) and gains (B, 3)."""
    floats = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    changed = jitter_colours(floats, torch.from_numpy(gains).float())
    assert changed.is_contiguous(memory_format=torch.channels_last)
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    return (changed.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()


def test_gains_of_one_change_nothing_on_the_device_and_black_and_white_survive() -> None:
    image = np.random.default_rng(1).integers(0, 256, (1, 16, 16, 3), dtype=np.uint8)
    image[0, 0, 0], image[0, 0, 1], image[0, 0, 2] = 0, 255, (7, 7, 7)
    np.testing.assert_array_equal(on_device(image, np.ones((1, 3))), image)
    darker = on_device(image, np.array([[1.0, 1.7, 0.5]]))
    assert darker[0, 0, 0].tolist() == [0, 0, 0]
    assert len(set(darker[0, 0, 1].tolist())) == 1


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    found = []
    for number in range(4):
        file = tmp_path / f"{number}.png"
        coarse = np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        cv2.imwrite(str(file), cv2.resize(coarse, (96, 96), interpolation=cv2.INTER_CUBIC))
        found.append(Photo(file, np.zeros(0, np.int64), []))
    return found


def test_a_batch_looks_the_same_wherever_its_colours_are_varied(photos: list[Photo]) -> None:
    def batch(on_device: bool, config: Augmentation) -> torch.Tensor:
        dataset = SegmentationDataset(
            photos, 96, augment=config, mosaic_epochs=9, seed=3, colours_on_device=on_device
        )
        collated = collate([dataset[(1, index)] for index in range(4)])
        assert (collated.colour_gains is not None) == (on_device and config is not COLOURLESS)
        return prepare_batch(collated, CPU)[0]

    by_loader, by_device = batch(False, Augmentation()), batch(True, Augmentation())
    assert float((by_loader - by_device).abs().mean()) < 1.5 / 255
    # Whole levels of hue are two degrees, which is 17 levels of a colour at most.
    assert float((by_loader - by_device).abs().max()) <= 20 / 255
    torch.testing.assert_close(batch(True, COLOURLESS), batch(False, COLOURLESS), rtol=0, atol=0)
    assert float((by_loader - batch(False, COLOURLESS)).abs().mean()) > 5 / 255


def test_nothing_is_copied_from_the_host_while_colours_vary_on_the_device() -> None:
    """Issue: a table of three numbers was copied to the GPU in each step, a
    third wait of the host.
    """

    names: list[str] = []
    images, gains = torch.rand(2, 3, 8, 8), torch.rand(2, 3)
    with Operators(lambda operator, *_: names.append(operator.overloadpacket.__name__)):
        jitter_colours(images, gains)
        assert "lift_fresh" not in names
        torch.tensor([5.0, 3.0, 1.0])
    assert "lift_fresh" in names
