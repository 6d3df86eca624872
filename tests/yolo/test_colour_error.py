"""The error of neighbours of like colour, for objects that have a box and no outline."""

import cv2
import numpy as np
import torch

from tests.yolo.test_mask_loss import BOXED, SIDE, case_of
from yolo_seg_ddp.yolo.colour_error import (
    ALIKE,
    NEIGHBOURS,
    colour_error,
    lab_colours,
)
from yolo_seg_ddp.yolo.mask_loss import find_positives, mask_loss


def test_colours_are_those_of_opencv() -> None:
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = cv2.cvtColor(image[0].permute(1, 2, 0).numpy(), cv2.COLOR_RGB2LAB)
    assert np.abs(lab_colours(image, 8)[0].permute(1, 2, 0).numpy() - expected).max() < 0.5
    assert lab_colours(image, 4).shape == (1, 3, 4, 4)


def test_each_pair_of_neighbours_of_like_colour_counts_once() -> None:
    (prototypes, coefficients, _, boxes), found = case_of("overlapping", 37, BOXED)
    colours = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    error = colour_error(prototypes, coefficients, found, boxes, colours)
    expected = torch.zeros(())
    for image, target in BOXED.nonzero().tolist():
        own = (found.image == image) & (found.target == target)
        if not own.any():
            continue
        row = coefficients[own].mean(0)
        on = torch.einsum("c,chw->hw", row, prototypes[image]).sigmoid()
        x1, y1, x2, y2 = boxes[image, target].ceil().clamp(0, SIDE).tolist()
        errors = []
        for y, x in np.ndindex(SIDE, SIDE):
            for down, right in NEIGHBOURS:
                other_y, other_x = y + down, x + right
                if not (other_y < SIDE and 0 <= other_x < SIDE):
                    continue
                places = [(y, x), (other_y, other_x)]
                if not any(x1 <= column < x2 and y1 <= line < y2 for line, column in places):
                    continue
                first, second = (colours[image, :, line, column] for line, column in places)
                if (first - second).norm() <= ALIKE:
                    p, q = (on[place] for place in places)
                    errors.append(-(p * q + (1 - p) * (1 - q)).log())
        expected = expected + torch.stack(errors).mean() * own.sum()
    torch.testing.assert_close(error, expected, rtol=1e-4, atol=1e-4)
    leaves = [prototypes, coefficients]
    for now, plain in zip(
        torch.autograd.grad(error, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(now, plain, rtol=1e-3, atol=1e-4)


def test_a_round_object_in_a_box_was_learned_with_the_corners_of_the_box() -> None:
    row, column = np.mgrid[:SIDE, :SIDE]
    disc = torch.from_numpy((row - 15.5) ** 2 + (column - 15.5) ** 2 < 10**2)
    colours = torch.zeros(1, 3, SIDE, SIDE)
    colours[0, 0] = torch.where(disc, 80.0, 20.0)
    boxes = torch.tensor([[[5.5, 5.5, 25.5, 25.5]]])
    boxed = torch.tensor([[True]])
    found = find_positives(
        torch.tensor([[True]]), torch.zeros(1, 1, dtype=torch.int64), boxes, SIDE, boxed
    )
    masks = torch.zeros(1, SIDE, SIDE, dtype=torch.int32)
    masks[0, 6:26, 6:26] = 1
    overlaps = []
    for weight in (0, 1):
        # The network begins with a square that fills the box.
        maps = torch.zeros(1, 32, SIDE, SIDE)
        maps[0, 0] = torch.where(masks[0] > 0, 1.0, -1.0)
        maps.requires_grad_()
        coefficients = torch.eye(32)[:1]
        optimizer = torch.optim.Adam([maps], 0.05)
        for _ in range(150):
            loss = mask_loss(maps, coefficients, masks, boxes, found)
            loss = loss + weight * colour_error(maps, coefficients, found, boxes, colours)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mask = maps[0, 0] > 0
        overlaps.append(float((mask & disc).sum() / (mask | disc).sum()))
    assert overlaps[0] < 0.85
    assert overlaps[1] > 0.9
