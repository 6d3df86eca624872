"""The training loop, for any task."""

from utils.engine.loop import TrainingEngine
from utils.engine.options import EngineOptions
from utils.engine.task import Epoch, Task
