"""The built-in sample: drawn photographs of a distribution line with every class, in EPRI's raw layout."""

from utils.data.parsing.label_csv import LABEL_CSV
from utils.data.sample.scene import SAMPLE_LINE_WIDTH_PX
from utils.data.sample.write import SampleReport, write_sample
