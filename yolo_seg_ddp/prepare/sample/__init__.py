"""The built-in sample: drawn photographs of a distribution line with every class, in EPRI's raw
layout.
"""

from yolo_seg_ddp.prepare.sample.write import write_sample
