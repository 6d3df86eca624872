"""The network's sizes and the ranges of the training records. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

OFFSETS = (0, 30)  # of the window without compression, in steps; all ranges include both ends
CONTEXTS = (11, 101)  # its length
SEGMENTS = (15, 60)  # length of a compressed segment; the first begins with the history
RECENT = (10, 80)  # steps after the segments
RECORDS_OF_DEPTH = (3, 20, 30, 40)  # of each history, by the number of segments
MAX_DEPTH = len(RECORDS_OF_DEPTH) - 1
STEP_FIELDS = ("cell", "action", "reward", "next cell")


@dataclass(frozen=True)
class ModelSize:
    """The network's sizes."""

    grid_size: int = 9
    width: int = 128
    heads: int = 8
    feedforward: int = 512
    encoder_layers: int = 3
    decoder_layers: int = 4
    latents: int = 40
    dropout: float = 0.1
    max_segment: int = SEGMENTS[1]  # steps that are compressed at once
    max_recent: int = max(CONTEXTS[1], RECENT[1])  # steps that are not compressed
