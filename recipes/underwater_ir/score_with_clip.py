"""Example: write a CLIP model's scores of Dataset/ for `export_pseudo_labels.py --scores`.

    pip install open_clip_torch
    python score_with_clip.py daclip_ViT-B-32.pt > daclip_scores.jsonl   # a file at hand
    python score_with_clip.py model.pt ViT-L-14 > scores.jsonl           # OpenCLIP's name of it

A score is the cosine similarity of a place in the picture with a prompt. Of DA-CLIP's weights the
controller looks at the picture, as it does for the kind of degradation; OpenCLIP needs no changes.
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional
from underwater_ir.commands.export_pseudo_labels import ExportConfig, folders
from underwater_ir.data.datasets import list_pictures
from underwater_ir.data.pseudo_labels import PROMPTS

from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.utils.errors import UsageError, UserError, one_line, run_script
from yolo_seg_ddp.utils.tensor_files import read_tensors

CONTROLLER = "visual_control."  # of the picture, in DA-CLIP's weights


@torch.inference_mode()
def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise UsageError("usage: python score_with_clip.py WEIGHTS [MODEL] > scores.jsonl")
    file, model = [*sys.argv[1:], "ViT-B-32"][:2]
    try:
        import open_clip
    except ImportError as error:
        raise UserError("OpenCLIP is missing: pip install open_clip_torch") from error
    saved = read_tensors(Path(file), "a file of weights")
    saved = saved.get("state_dict", saved)
    weights = {name.removeprefix("module."): value for name, value in saved.items()}
    # DA-CLIP's: its CLIP, then the controller in the place of what sees the picture
    for name in [name for name in weights if name.startswith("clip.")]:
        weights[name.removeprefix("clip.")] = weights.pop(name)
    for name in [name for name in weights if name.startswith(CONTROLLER)]:
        weights[name.replace(CONTROLLER, "visual.")] = weights.pop(name)
    weights = {name: value for name, value in weights.items() if "zero_modules" not in name}
    network, _, prepare = open_clip.create_model_and_transforms(model)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{file}: not weights of {model} ({one_line(error)})") from error
    visual = network.eval().visual
    visual.output_tokens = True
    text = network.encode_text(open_clip.get_tokenizer(model)(list(PROMPTS)))
    text = functional.normalize(text, dim=1)  # (K, D)
    header = {"teacher": Path(file).stem, "prompts": PROMPTS, "text_embeddings": text.tolist()}
    print(json.dumps(header))
    config = ExportConfig()
    for source, labels in folders(config):
        for picture in list_pictures(source):
            image = prepare(Image.fromarray(read_image(source / picture)))
            tokens = (visual(image[None])[1] @ visual.proj)[0]  # (h * w, D)
            scores = (text @ functional.normalize(tokens, dim=1).T).clamp(-1, 1)
            scores = scores.double().round(decimals=4).reshape(len(text), *visual.grid_size)
            name = (labels / picture).relative_to(config.pseudo_root)
            print(json.dumps({"picture": str(name), "scores": scores.tolist()}), flush=True)


if __name__ == "__main__":
    run_script(main)
