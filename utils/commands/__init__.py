"""What `evaluate_model.py` does after reading its command line; `yolo_seg_ddp.py` calls the same.

In: a script's options. Out: what the script writes, and its figures. Read `evaluation.py`.
"""
