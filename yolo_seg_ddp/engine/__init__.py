"""The training loop, for any task."""

from yolo_seg_ddp.engine.loop import TrainingEngine
from yolo_seg_ddp.engine.options import EngineOptions
from yolo_seg_ddp.engine.task import Epoch, Task
