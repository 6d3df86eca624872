"""The built-in sample: drone-like photographs of a distribution line with every class, in EPRI's raw layout."""

from utils.data.sample.scene import SAMPLE_LINE_WIDTH_PX
from utils.data.sample.write import LABELS_FILE_NAME, SampleReport, write_sample

__all__ = ["LABELS_FILE_NAME", "SAMPLE_LINE_WIDTH_PX", "SampleReport", "write_sample"]
