"""What train_yolo_ddp.py trains with: its options, data and plan, and what the engine needs for
YOLO segmentation.

In: the trainer's options. Out: `Data`, `TrainPlan` and the task. Read train_yolo_ddp.py first: it
shows the steps in their order.
"""
