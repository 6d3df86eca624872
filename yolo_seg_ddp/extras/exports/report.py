"""The rows of `export.py`'s report: proof, file size, speed and memory of each export beside
torch's.
"""

import shlex
from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.extras.exports.conversion import Variant
from yolo_seg_ddp.extras.exports.proof import (
    MASKS_PER_INPUT,
    NO_AP,
    Proof,
    finds_nothing,
    largest_change,
)
from yolo_seg_ddp.extras.exports.speed import images_per_second, peak_memory
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.utils.text import format_bytes, format_table

Row = dict[str, Any]


def row_of(variant: Variant, made: Path, proof: Proof, *, has_thresholds: bool = False) -> Row:
    """Return an export's row. `compute` is the value of --amp that its speed is measured with."""
    files = made.rglob("*") if made.is_dir() else [made]
    return {
        "format": variant.kind,
        "precision": variant.precision,
        "compute": "off",
        "file": made.name,
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "failures": proof.failures,
        "largest_difference": proof.largest,
        "per_class": proof.per_class,
        "mask_iou": proof.mask_iou,
        "thresholds": has_thresholds,
    }


def add_speed(
    rows: list[Row], model: str, folder: Path, images: torch.Tensor, device: torch.device
) -> list[Row]:
    """Return the rows with images per second and peak memory; torch's are added in front.

    If the hardware has bf16, torch and OpenVINO are measured in it, too. Exports that failed are
    not measured.
    """
    fast = choose_precision("auto", device)
    base = {
        "format": "torch",
        "precision": "fp32",
        "compute": "off",
        "file": Path(model).name,
        "failures": [],
    }
    size = {"bytes": Path(model).stat().st_size}
    measured: list[Row] = []
    for row in [{**base, **size}, *rows]:
        measured.append(row)
        computes_in_bf16 = row["format"] == "torch" or (
            row["format"] == "openvino" and device.type == "cpu"
        )
        if (
            fast.dtype is not None
            and computes_in_bf16
            and row["precision"] != "int8"
            and not row["failures"]
        ):
            measured.append({**{key: row[key] for key in (*base, "bytes")}, "compute": fast.name})
    networks = {}
    for number, row in enumerate(measured):
        if row["failures"]:
            continue
        path = model if row["format"] == "torch" else str(folder / row["file"])
        row["peak_memory_bytes"] = peak_memory(
            path, str(device), row["compute"], tuple(images.shape)
        )
        dtype = fast.dtype if row["compute"] != "off" else None
        networks[number] = (open_model(path, device, row["compute"]), dtype)
    for number, speed in images_per_second(networks, images).items():
        measured[number]["images_per_second"] = speed
    return measured


def _verdict(row: Row) -> str:
    if row["failures"] or not row.get("largest_difference"):
        return "failed" if row["failures"] else "-"
    if not finds_nothing(row["per_class"]):
        return "proven"
    return "finite" if row["precision"] == "int8" else "outputs only"


def instead_of_ap(rows: list[Row], model: str) -> list[str]:
    """Return lines about the comparison of masks if the model finds nothing, because equal AP then
    proves nothing; else none.
    """
    judged = [row for row in rows if row.get("mask_iou")]
    if not judged or not finds_nothing(judged[0]["per_class"]):
        return []
    lines = [
        f"{model} finds nothing on these photographs (AP below {NO_AP} in every class): equal AP "
        "proves nothing. Compared instead:"
    ]
    for row in judged:
        mean, lowest = row["mask_iou"]
        lines.append(
            f"  {row['file']}: masks of the {MASKS_PER_INPUT} most confident anchors of each input "
            f"have an IoU of {mean:.4f} with torch's, the lowest {lowest:.4f}; probabilities "
            f"differ by at most {row['largest_difference']['probabilities']:.2g}"
        )
    return lines


def inference_command(rows: list[Row], folder: Path) -> str:
    """Return a command with the fastest export that was written; an empty string if none was."""
    written = [row for row in rows if row["format"] != "torch" and not row["failures"]]
    if not written:
        return ""
    best = max(written, key=lambda row: row.get("images_per_second") or 0)
    amp = f" --amp {best['compute']}" if best["compute"] != "off" else ""
    speed = (
        " (the fastest here)"
        if len({row["file"] for row in written}) > 1 and best.get("images_per_second")
        else ""
    )
    file = folder / best["file"]
    return (
        f"Use {file}{speed}: python inference.py --model {shlex.quote(str(file))} --source "
        f"PHOTOGRAPHS{amp}"
    )


def table(rows: list[Row]) -> str:
    """Return one line per row: size, speed, memory, the largest differences from torch, and whether
    it was written.
    """
    torch_speed = next(
        (row.get("images_per_second") for row in rows if row["format"] == "torch"), None
    )
    lines = []
    for row in rows:
        speed = row.get("images_per_second")
        change = largest_change(row.get("per_class", []))
        differences = row.get("largest_difference", {})
        lines.append(
            [
                row["format"],
                row["precision"] + (f", --amp {row['compute']}" if row["compute"] != "off" else ""),
                format_bytes(row["bytes"]),
                f"{speed:.1f}" if speed else None,
                f"{speed / torch_speed:.2f}" if speed and torch_speed else None,
                format_bytes(row["peak_memory_bytes"]) if "peak_memory_bytes" in row else None,
                f"{differences['boxes']:.2g}" if "boxes" in differences else None,
                f"{differences['probabilities']:.2g}" if "probabilities" in differences else None,
                f"{change[0]:+.4f} ({change[1]})" if change else None,
                _verdict(row),
            ]
        )
    header = [
        "format",
        "precision",
        "size",
        "images/s",
        "of torch",
        "peak memory",
        "boxes, px",
        "probability",
        "AP",
    ]
    return format_table([*header, "proof"], lines)
