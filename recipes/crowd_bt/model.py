"""The networks: an image's quality, and the comparison of two images
with the crowd's reliability.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from yolo_seg_ddp.utils.errors import UserError, one_line, print_warning
from yolo_seg_ddp.utils.option_names import nearest
from yolo_seg_ddp.utils.tensor_files import read_tensors

DROPOUT = 0.2
LAST_LAYER_STD = 0.01
# of the crowd's first reliability: at 0.5 and 1 its logit would be infinite
CROWD_BOUNDS = (0.501, 0.999)
ANNOTATOR_BOUNDS = (0.05, 0.95)  # of an annotator's, which a few gold pairs have measured


class QualityScorer(nn.Module):
    """A backbone of timm and a head that gives one quality value per image; a higher value is
    better.
    """

    def __init__(self, backbone: nn.Module, num_features: int) -> None:
        super().__init__()
        self.backbone = backbone
        # No in-place operation: several forward passes may share one backward pass.
        self.head = nn.Sequential(
            nn.Linear(num_features, 512),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(256, 1),
        )
        for layer in self.head:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        # Kaiming's deviation for one output is 1.4: qualities would begin far apart, where the
        # Crowd-BT loss is flat.
        nn.init.normal_(self.head[-1].weight, std=LAST_LAYER_STD)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map normalised images (N, 3, S, S) to qualities (N,), float32."""
        return self.head(self.backbone(images)).squeeze(1).float()  # type: ignore[no-any-return]


class PairModel(nn.Module):
    """The trained module: the scorer and the reliabilities, which must be inside DDP's module.

    `eta` is the first η: one for the whole crowd, or a list of the annotators'. With λ =
    `eta_logit` an annotator's η is σ(λ). The crowd's η is 1/2 + σ(λ)/2, because a crowd as a whole
    does not mislead. Without learning η stays as given. `draw_log` is log ν, how often pairs of
    equal quality are a draw; it is always learned.
    """

    eta_logit: nn.Parameter | None

    def __init__(
        self,
        scorer: QualityScorer,
        eta: float | Sequence[float],
        is_learnable: bool = True,
        draw_log: float = 0.0,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.draw_log = nn.Parameter(torch.tensor(draw_log))
        first = torch.tensor(eta, dtype=torch.float32)
        self.register_parameter(
            "eta_logit", nn.Parameter(logit_of(first)) if is_learnable else None
        )
        self.register_buffer("fixed_eta", None if is_learnable else first)

    @property
    def eta(self) -> torch.Tensor:
        """The crowd's reliability (), or each annotator's (K,)."""
        if self.eta_logit is None:
            return self.fixed_eta  # type: ignore[return-value]
        share = torch.sigmoid(self.eta_logit)
        return share if share.dim() else 0.5 + 0.5 * share

    def forward(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map images (B, 2, 3, S, S) to the differences of their qualities (B,), by one pass of the
        scorer, η and log ν.
        """
        scores = self.scorer(pairs.flatten(0, 1)).view(-1, 2)
        return scores[:, 0] - scores[:, 1], self.eta, self.draw_log


def logit_of(eta: torch.Tensor) -> torch.Tensor:
    """Return λ of the crowd's η () or of annotators' (K,), which is
    first moved between the bounds.
    """
    return torch.logit(
        eta.clamp(*ANNOTATOR_BOUNDS) if eta.dim() else 2 * eta.clamp(*CROWD_BOUNDS) - 1
    )


def build_scorer(
    name: str, *, pretrained: bool = False, grad_checkpointing: bool = False, input_size: int = 448
) -> QualityScorer:
    """Return a scorer on a backbone of timm; without a network pretrained weights are replaced by
    random ones.

    Raises UserError for an unknown name and for a network that cannot take the input size.
    """
    try:
        import timm
    except ImportError as error:
        raise UserError(
            "timm is missing: pip install -r requirements.txt in this folder"
        ) from error
    if not timm.is_model(name):
        raise UserError(
            f"--backbone {name}: timm has no such network{nearest(name, timm.list_models())}"
        )
    backbone = _with_weights(name) if pretrained else None
    try:
        backbone = backbone or timm.create_model(name, pretrained=False, num_classes=0)
        if grad_checkpointing:
            # timm's networks have it
            backbone.set_grad_checkpointing(True)  # type: ignore[operator]
        with torch.no_grad():
            backbone.eval()
            features = backbone(torch.zeros(1, 3, input_size, input_size))
    except (
        RuntimeError,
        AssertionError,
        ValueError,
        AttributeError,
        TypeError,
        NotImplementedError,
    ) as error:
        raise UserError(
            f"--backbone {name} at --input-size {input_size}: {one_line(error)}"
        ) from error
    if features.dim() != 2:
        raise UserError(
            f"--backbone {name}: gives features {tuple(features.shape)} instead of one row per "
            "image"
        )
    # Some networks report another width than their features have.
    return QualityScorer(backbone.train(), features.shape[1])


def _with_weights(name: str) -> nn.Module | None:
    """Return the pretrained backbone, or None with a warning when its weights cannot be had."""
    import timm

    # it would print ten lines about its attempts
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return timm.create_model(name, pretrained=True, num_classes=0)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(error, 120)
        print_warning(
            f"--backbone {name}: its pretrained weights cannot be fetched ({reason}); training "
            "begins with random weights, as with --no-pretrained"
        )
        return None


def load_scorer(
    path: str | Path,
    device: torch.device,
    backbone: str | None = None,
    input_size: int | None = None,
) -> tuple[QualityScorer, dict[str, Any]]:
    """Load a trained scorer for evaluation; return it with its `config` (backbone_name,
    input_size).

    Raises UserError when the file is missing, foreign, or of another backbone than the one that is
    named.
    """
    saved = read_checkpoint(Path(path))
    config = dict(saved["config"])
    if backbone is not None and backbone != config["backbone_name"]:
        raise UserError(
            f"--backbone {backbone}: {path} holds {config['backbone_name']}; leave the flag out"
        )
    config["input_size"] = input_size or config["input_size"]
    scorer = build_scorer(config["backbone_name"], input_size=config["input_size"])
    try:
        scorer.load_state_dict(saved["model"])
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: its weights do not fit {config['backbone_name']} ({one_line(error)})"
        ) from error
    return scorer.to(device).eval(), config


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of best_model.pt, last.pt and the like.

    Raises UserError for any other file.
    """
    what = "a checkpoint of this scorer"
    saved: dict[str, Any] = read_tensors(
        path, what, "no such checkpoint; train.py writes best_model.pt and last.pt"
    )
    config = saved.get("config")
    if not isinstance(config, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path}: not {what}")
    if not isinstance(config.get("backbone_name"), str) or not isinstance(
        config.get("input_size"), int
    ):
        raise UserError(f"{path}: not {what} (it names no backbone and input size)")
    return saved
