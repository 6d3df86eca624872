"""The YOLO segmentation network, its loss, the assigner and the optimizer.

In: batches of `yolo_seg_ddp/data`. Out: raw outputs of the network, sums of the loss for all ranks.
Read `model.py` first, then `loss.py`.
"""
