"""Write the scores of a CLIP model or of DA-CLIP for `export_pseudo_labels.py --scores`.

    pip install open_clip_torch
    python score_with_clip.py --weights daclip_ViT-B-32.pt --scores daclip_scores.jsonl

A score is the cosine similarity of a place in the picture with a prompt. Of DA-CLIP's weights the
controller looks at the picture, as it does for the kind of degradation; OpenCLIP needs no changes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from underwater_ir.commands.export_pseudo_labels import ExportConfig, folders
from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import PROMPTS
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import choose_device
from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import option
from yolo_seg_ddp.utils.tensor_files import read_tensors

CONTROLLER = "visual_control."  # of the picture, in DA-CLIP's weights


@dataclass(frozen=True)
class ScoreConfig(ExportConfig):
    weights: str = option("", "weights of the model", metavar="FILE", required=True)
    model: str = option("ViT-B-32", "OpenCLIP's name of a vision transformer", metavar="NAME")
    scores: str | None = option("daclip_scores.jsonl", "file to write", metavar="FILE")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")


@torch.inference_mode()
def main() -> None:
    config = parse_config(ScoreConfig, "Write a CLIP model's scores of a data set.")
    device = choose_device(config.device, 0)
    try:
        import open_clip
    except ImportError as error:
        raise UserError("OpenCLIP is missing: pip install open_clip_torch") from error
    try:
        network, _, prepare = open_clip.create_model_and_transforms(config.model)
        network.load_state_dict(clip_weights(Path(config.weights)))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UserError(
            f"--weights {config.weights} do not fit --model {config.model} ({one_line(error)})"
        ) from error
    network = network.eval().to(device)
    network.visual.output_tokens = True
    words = open_clip.get_tokenizer(config.model)(list(PROMPTS)).to(device)
    text = functional.normalize(network.encode_text(words), dim=1)  # (K, D)
    header = {"teacher": Path(config.weights).stem, "prompts": PROMPTS}
    lines: list[Any] = [{**header, "text_embeddings": rounded(text)}]
    for source, labels in folders(config):
        for picture in list_pictures(source):
            image = prepare(Image.fromarray(read_image(source / picture)))[None].to(device)
            tokens = network.visual(image)[1] @ network.visual.proj  # (1, h * w, D)
            similarity = text @ functional.normalize(tokens[0], dim=1).T
            scores = similarity.clamp(-1, 1).reshape(len(text), *network.visual.grid_size)
            name = (labels / picture).relative_to(config.pseudo_root)
            lines.append({"picture": str(name), "scores": rounded(scores)})
    output = Path(str(config.scores))
    write_text_atomic(output, "".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines) - 1} pictures -> {output}")


def clip_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a CLIP model as OpenCLIP names them. Raises UserError."""
    saved = read_tensors(path, "a file of weights", flag="--weights ")
    saved = saved.get("state_dict", saved)
    weights = {name.removeprefix("module."): value for name, value in saved.items()}
    if not any(name.startswith(CONTROLLER) for name in weights):
        return weights
    return {
        name.removeprefix("clip."): value
        for name, value in weights.items()
        if name.startswith("clip.") and not name.startswith("clip.visual.")
    } | {
        "visual." + name.removeprefix(CONTROLLER): value
        for name, value in weights.items()
        if name.startswith(CONTROLLER) and "zero_modules" not in name
    }


def rounded(values: torch.Tensor) -> list[Any]:
    return list(np.round(values.float().cpu().numpy().astype(float), 4).tolist())
