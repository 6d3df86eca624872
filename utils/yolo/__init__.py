"""The YOLO segmentation network, its loss, the assigner and the optimizer.

In: batches of `utils/data`. Out: raw outputs of the network, sums of the loss for all ranks. Read `model.py` first, then `loss.py`.
"""
