"""The network's sizes and the ranges of the training records. Imports no PyTorch."""

from dataclasses import dataclass
from typing import ClassVar

from yolo_seg_ddp.utils.options import Options, option

OFFSETS = (0, 30)  # of the window without compression, in steps; all ranges include both ends
CONTEXTS = (11, 101)  # its length
SEGMENTS = (15, 60)  # length of a compressed segment; the first begins with the history
RECENT = (10, 80)  # steps after the segments
RECORDS_OF_DEPTH = (3, 20, 30, 40)  # of each history, by the number of segments
MAX_DEPTH = len(RECORDS_OF_DEPTH) - 1
STEP_FIELDS = ("cell", "action", "reward", "next cell")


@dataclass(frozen=True)
class ModelSize(Options):
    """The options that are the network's sizes."""

    grid_size: int = option(9, "cells on a side", at_least=3, at_most=15)
    width: int = option(128, "channels", at_least=1)
    heads: int = option(8, "attention heads", at_least=1)
    feedforward: int = option(512, "channels between a block's last two layers", at_least=1)
    encoder_layers: int = option(
        3, "blocks that compress; 0: the baseline, which forgets instead", at_least=0
    )
    decoder_layers: int = option(4, "blocks that predict", at_least=1)
    latents: int = option(40, "tokens of the compressed history", at_least=1)
    dropout: float = option(0.1, "share of channels set to 0 in training", at_least=0, below=1)
    max_segment: ClassVar[int] = SEGMENTS[1]  # steps that are compressed at once
    max_recent: ClassVar[int] = max(CONTEXTS[1], RECENT[1])  # steps that are not compressed
