"""Downloads the raw data from a server or a folder. Can be interrupted and repeated."""

from utils.sources.download.address import DEFAULT_BASE_URL, expand_circuits, open_source
from utils.sources.download.raw_data import Report, download
from utils.sources.download.source import RetryPolicy
