"""Downloads the raw data from a server or a folder. Can be interrupted and repeated."""

from utils.data.download.address import DEFAULT_BASE_URL, expand_circuits, open_source
from utils.data.download.raw_data import Report, download
from utils.data.download.source import RetryPolicy
