"""The IoU of predicted and true masks, by which YOLO26 also judges which anchors suit a target."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PIXELS_AT_ONCE = 2**24  # of predicted masks, computed together: bounds the memory


@dataclass(frozen=True)
class PredictedMasks:
    """What a network predicts for masks, and the true masks. Letters as in `utils.yolo.mask_loss`."""

    prototypes: torch.Tensor  # (B, 32, S, S)
    coefficients: torch.Tensor  # (B, 32, A)
    masks: torch.Tensor  # int32 (B, S, S): k + 1 where an image's k-th target is
    size_px: int  # side of the input

    @torch.no_grad()
    def overlap(self, chosen: torch.Tensor, inside: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """Return the masks' IoU of the chosen anchors (B, M, K) with each target, 0 for the others: (B, M, A).

        Of the chosen anchors only those inside the target's box are compared, see `inside` bool (B, M, A). boxes
        (4, B, A): the predicted xyxy in input pixels; a predicted mask is cut to them, as in prediction. Costs one host
        synchronisation.
        """
        is_chosen = torch.zeros_like(inside).scatter_(-1, chosen, True) & inside
        counts = is_chosen.sum((1, 2)).tolist()
        places = torch.nonzero_static(is_chosen, size=sum(counts))  # (N, 3): image, target, anchor
        found = boxes.new_zeros(inside.shape)
        step = max(PIXELS_AT_ONCE // self.masks[0].numel(), 1)
        for image, of_image in enumerate(places.split(counts)):
            for part in of_image.split(step) if len(of_image) else ():
                _, target, anchor = part.unbind(1)
                found[image, target, anchor] = self._overlap_in(image, target, anchor, boxes[:, image, anchor])
        return found

    def _overlap_in(self, image: int, target: torch.Tensor, anchor: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """Return the IoU of paired targets and anchors (n,) of an image, whose predicted boxes are (4, n): (n,)."""
        prototypes, truth = self.prototypes[image].float(), self.masks[image]
        side = truth.shape[-1]
        rows = self.coefficients[image].float().T[anchor]  # (n, 32)
        x1, y1, x2, y2 = (boxes * (side / self.size_px))[..., None]  # (n, 1) each, in prototype pixels
        pixel = torch.arange(side, device=boxes.device)
        column, row = (pixel >= x1) & (pixel < x2), (pixel >= y1) & (pixel < y2)  # (n, S) each
        predicted = (rows @ prototypes.flatten(1)).view(-1, side, side) > 0
        predicted &= column[:, None] & row[..., None]
        true = truth == target[:, None, None] + 1  # (n, S, S)
        shared = (predicted & true).sum((1, 2))
        return shared / (predicted | true).sum((1, 2)).clamp(min=1)
