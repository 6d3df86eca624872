"""A made-up evaluation to write a report of, and what reads the figures of a page back."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from tests.evaluation.made_up import random_results
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.evaluation.metrics.summary import (
    calibration,
    operating_points,
    precision_recall_curves,
    summarise,
)
from yolo_seg_ddp.extras.report.gallery import Card
from yolo_seg_ddp.extras.report.page import Subject
from yolo_seg_ddp.extras.report.tables import value_at

HOSTILE = (
    '</script><script>document.title="broken"</script>',
    '"><img src=x onerror=document.title="broken">',
    "'; DROP & <b>bold</b> &amp; --></style><!--",
    "javascript:alert(1)\u202e\x00\n\ud800 name",
)


def made_up_subject(names: Sequence[str], seed: int) -> Subject:
    results = random_results(seed, 30, len(names), decimals=2)
    scores = [f"{kind}_{name}" for kind in ("box", "mask") for name in ("map50", "map50_95")]
    sizes = {"small": None, "medium": 0.1 / 3, "large": 0.7}
    metrics = {
        "model": f"models/{names[0]}/best.pt",
        "data": "data/dataset.yaml",
        "split": "val",
        "img_size": 640,
        "mask_resolution": "proto",
        **summarise(results, list(names)),
        "val_loss": 1.25 + seed,
        "by_size": {
            size: {"num_targets": 7, **dict.fromkeys(scores, value)}
            for size, value in sizes.items()
        },
        "operating_points": operating_points(results, names),
        "calibration": calibration(results),
        "worst_images": [made_up_card(1, number).errors for number in range(3)],
    }
    return Subject(json.loads(json.dumps(metrics)), precision_recall_curves(results, list(names)))


def made_up_card(num_models: int, number: int, file: str = "photo.jpg") -> Card:
    picture = encode_jpeg(np.full((120, 160, 3), 60 * number, np.uint8))
    errors = {"file": file, "image_id": number, "num_targets": 9}
    errors |= {"missed": 3 - number, "false": number, "confused": 2 * number}
    return Card(errors, picture, [picture] * num_models, [f"{number + 1} × missed: {file}"])


class Elements(HTMLParser):
    """Lists what a page consists of: (element, attributes), and the text right behind each
    `data-key`.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = dict(attrs) if any(name == "data-key" for name, _ in attrs) else None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open is not None:
            self.figures.append((self._open, data))
            self._open = None


def check_figures(page: str, metrics: Sequence[dict[str, Any]]) -> int:
    """Compare every figure of a page with metrics.json, to the last bit;
    return how many there are.
    """
    figures = Elements(page).figures
    for attributes, text in figures:
        value = value_at(
            metrics[int(attributes.get("data-model") or 0)], str(attributes["data-key"])
        )
        if value is None:
            assert text == "–", attributes
        else:
            assert json.loads(str(attributes["data-value"])) == value, attributes
            assert float(text.replace(",", "")) == pytest.approx(value, abs=0.00050001), attributes
    return len(figures)
