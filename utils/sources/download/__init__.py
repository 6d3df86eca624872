"""Downloads the raw data from a server or a folder. Can be interrupted and repeated."""

from utils.sources.download.raw_data import Report, download
from utils.sources.download.source import RetryPolicy
from utils.sources.download.web import DEFAULT_BASE_URL, expand_circuits, open_source
