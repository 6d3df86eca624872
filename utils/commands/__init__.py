"""What `train_yolo_ddp.py` and `evaluate_model.py` do after reading their command lines; `yolo_seg_ddp.py` calls the same.

In: a script's options. Out: what the script writes, and its figures. Read `training.py` first.
"""
