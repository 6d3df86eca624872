"""report.html of an evaluation: scores, curves, thresholds, confusion, sizes, calibration, worst images."""

from utils.evaluation.report.gallery import Viewer, choose_worst, count_errors, draw_cards
from utils.evaluation.report.page import Subject, build_page
from utils.evaluation.report.photographs import write_photographs
