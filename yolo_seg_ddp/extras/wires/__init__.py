"""Lines of thin objects, such as wires: from a mask to a centreline with a width, and back to the
mask that it draws.

In: masks with a class and a confidence, the photograph, and what the labels of the training say
(`wire_labels.py`). Out: lines with a confidence of their own. `numbers.py` holds the numbers of the
extra. Read `step.py`, then `replacing.py`.

A training asks for `measure_wire_labels` and `line_rules`, a prediction for `steps_for` and
`find_routes`.
"""

from yolo_seg_ddp.extras.wires.routes import find_routes
from yolo_seg_ddp.extras.wires.step import steps_for
from yolo_seg_ddp.extras.wires.wire_labels import line_rules, measure_wire_labels

__all__ = ["find_routes", "line_rules", "measure_wire_labels", "steps_for"]
