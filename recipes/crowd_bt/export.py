"""Write a trained scorer as ONNX and check the file against PyTorch with ONNX Runtime.

python export.py --checkpoint results/best_model.pt --output results/scorer.onnx
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import numpy as np
import torch
from crowd_bt.images import statistics_on
from crowd_bt.model import load_scorer
from crowd_bt.options import BEST_MODEL
from torch import nn

from utils.common.config import Options, option, parse_config
from utils.common.errors import EXIT_DONE, UserError, one_line, run_script

INPUT, OUTPUT = "images", "quality"
CHECKED_BATCHES = (1, 3)
TOLERANCE = 1e-4  # of a quality, relative to 1 + |quality|


@dataclass(frozen=True)
class ExportConfig(Options):
    checkpoint: str = option(f"results/{BEST_MODEL}", "trained model", metavar="FILE")
    output: str = option("scorer.onnx", "file to write", metavar="FILE")
    backbone: str | None = option(None, "must be the checkpoint's, which is the default", metavar="NAME")
    input_size: int | None = option(None, "side of the input in pixels; unset: the checkpoint's", at_least=32)


class FromPixels(nn.Module):
    """The scorer with the normalisation in front: its input are RGB values from 0 to 255."""

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer
        self.mean, self.std = statistics_on(torch.device("cpu"))  # made here: the exporter would make them symbolic

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map RGB images float32 (N, 3, S, S), 0 to 255, to qualities (N,)."""
        return self.scorer((images - self.mean) / self.std)  # type: ignore[no-any-return]


def main() -> int:
    """Export and check; return the exit code."""
    config = parse_config(ExportConfig, "Export the Crowd-BT quality scorer as ONNX")
    scorer, facts = load_scorer(config.checkpoint, torch.device("cpu"), config.backbone, config.input_size)
    model, size_px, file = FromPixels(scorer).eval(), facts["input_size"], Path(config.output)
    write_onnx(model, size_px, file, facts)
    gap = largest_gap(model, size_px, file)
    print(f"{file}: {INPUT} float32 (N, 3, {size_px}, {size_px}), RGB 0 to 255 -> {OUTPUT} (N,)")
    print(f"Largest difference to PyTorch: {gap:.1e}")
    if not gap <= TOLERANCE:
        raise UserError(f"{file}: differs from PyTorch by {gap:.1e}, more than {TOLERANCE:g}; do not use it")
    return EXIT_DONE


def write_onnx(model: nn.Module, size_px: int, file: Path, facts: dict[str, object]) -> None:
    """Write a model with any batch size as one ONNX file, atomically. Raises UserError."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install -r requirements.txt in this folder") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")
    example = torch.zeros(2, 3, size_px, size_px)
    shapes = {INPUT: {0: torch.export.Dim("batch", min=1)}}
    options: dict[str, Any] = {"external_data": False, "verbose": False, "dynamic_shapes": shapes}
    options |= {"input_names": [INPUT], "output_names": [OUTPUT]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (example,), temporary, dynamo=True, **options)
        exported = onnx.load(temporary)
        entry = exported.metadata_props.add()
        entry.key, entry.value = "crowd_bt", json.dumps(facts)
        onnx.checker.check_model(exported)
        onnx.save(exported, temporary)
        os.replace(temporary, file)
    except (RuntimeError, ValueError, TypeError, onnx.checker.ValidationError) as error:
        raise UserError(f"{file}: this network cannot be exported ({one_line(error)})") from error
    finally:
        temporary.unlink(missing_ok=True)


def largest_gap(model: nn.Module, size_px: int, file: Path) -> float:
    """Return the largest difference between the file's and the model's qualities, relative to 1 + |quality|."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    generator, gaps = np.random.default_rng(0), []
    for batch in CHECKED_BATCHES:
        images = generator.uniform(0, 255, (batch, 3, size_px, size_px)).astype(np.float32)
        (found,) = session.run([OUTPUT], {INPUT: images})
        with torch.no_grad():
            expected = model(torch.from_numpy(images)).numpy()
        gaps.append(float((np.abs(found - expected) / (1 + np.abs(expected))).max()))
    return max(gaps)


if __name__ == "__main__":
    run_script(main)
