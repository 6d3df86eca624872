"""The built-in sample: drawn photographs of a distribution line with every class, in EPRI's raw layout."""

from utils.sources.sample.write import write_sample
