"""How good the predicted objects are: average precision, thin objects, photograph pixels, COCO's
judge.

In: predictions and labels, shared out over the ranks. Out: one dictionary of metrics, equal on
every rank. Read `evaluate.py` first.
"""
