"""Runs on an MLflow server: a training's folder is mirrored there while it grows."""

from yolo_seg_ddp.extras.mlflow.sending import checked_uri, mirror
