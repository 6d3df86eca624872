"""A made-up evaluation to write a report of."""

import json
from collections.abc import Sequence

import numpy as np

from tests.evaluation.made_up import random_results
from utils.data.images import encode_jpeg
from utils.evaluation.metrics.summary import calibration, operating_points, precision_recall_curves, summarise
from utils.pages.report import Subject
from utils.pages.report.gallery import Card

HOSTILE = (
    '</script><script>document.title="broken"</script>',
    '"><img src=x onerror=document.title="broken">',
    "'; DROP & <b>bold</b> &amp; --></style><!--",
    "javascript:alert(1)\u202e\x00\n\ud800 name",
)


def made_up_subject(names: Sequence[str], seed: int) -> Subject:
    results = random_results(seed, 30, len(names), decimals=2)
    metrics = {
        "model": f"models/{names[0]}/best.pt",
        "data": "data/dataset.yaml",
        "split": "val",
        "img_size": 640,
        "mask_resolution": "proto",
        **summarise(results, list(names)),
        "val_loss": 1.25 + seed,
        "by_size": {
            size: {
                "num_targets": 7,
                **{f"{kind}_{name}": value for kind in ("box", "mask") for name in ("map50", "map50_95")},
            }
            for size, value in (("small", None), ("medium", 0.1 / 3), ("large", 0.7))
        },
        "operating_points": operating_points(results, names),
        "calibration": calibration(results),
        "worst_images": [made_up_card(1, number).errors for number in range(3)],
    }
    return Subject(json.loads(json.dumps(metrics)), precision_recall_curves(results, list(names)))


def made_up_card(num_models: int, number: int, file: str = "photo.jpg") -> Card:
    picture = encode_jpeg(np.full((120, 160, 3), 60 * number, np.uint8))
    errors = {
        "file": file,
        "image_id": number,
        "num_targets": 9,
        "missed": 3 - number,
        "false": number,
        "confused": 2 * number,
    }
    return Card(errors, picture, [picture] * num_models, [f"{number + 1} × missed: {file}"])
