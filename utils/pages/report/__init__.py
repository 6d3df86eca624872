"""report.html of an evaluation: scores, curves, thresholds, confusion, sizes, calibration, worst images."""

from utils.pages.report.gallery import Thumbnails, Viewer, choose_worst, count_errors, draw_cards, num_errors
from utils.pages.report.page import Subject, build_page
from utils.pages.report.photographs import write_photographs
