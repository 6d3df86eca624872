"""report.html and photographs.html of an evaluation: evaluate_model.py calls `Thumbnails`, and `write_pages` at its end."""

from extras.report.gallery import Thumbnails
from extras.report.page import write_pages
