"""Exported models (ONNX, OpenVINO, TorchScript, TensorRT) and the proof that they find what the checkpoint finds.

In: a checkpoint. Out: an exported model with its facts, a report. Read `command.py` first, then `conversion.py` and `proof.py`.
"""

from collections.abc import Sequence

from extras.exports.exported import open_export


def main(description: str, words: Sequence[str] | None = None) -> tuple[list[str], int]:
    """Run the command `export.py`, or its steps with the words of a command line; return the files and the exit code."""
    from extras.exports.command import run  # here: to open an export needs no evaluation, and its memory is measured

    return run(description, words)
