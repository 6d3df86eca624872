"""The training loop, for any task."""

from utils.engine.loop import TrainingEngine

__all__ = ["TrainingEngine"]
