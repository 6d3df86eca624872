"""What assembles options, data, network and engine into `train_yolo_ddp.py`, and starts it.

In: the trainer's options. Out: an engine that is ready to train. Read `data.py` and `regime.py`, then `assembly.py`.
"""
