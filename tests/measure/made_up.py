"""The smallest job that ranks can train."""

from yolo_seg_ddp.measure.scaling import RankJob

JOB = RankJob(
    model="yolov8n-seg.yaml",
    batch_size_per_gpu=1,
    img_size=64,
    warmup_steps=1,
    steps=1,
    amp="off",
    device="cpu",
    timeout_s=60,
)
