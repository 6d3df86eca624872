"""The smallest job that ranks can train."""

from utils.measure.scaling_rank import RankJob

JOB = RankJob(
    model="yolov8n-seg.yaml",
    global_batch_size=1,
    img_size=64,
    objects_per_image=3,
    warmup_steps=1,
    steps=1,
    amp="off",
    device="cpu",
    timeout_s=60,
)
