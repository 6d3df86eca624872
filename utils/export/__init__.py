"""Exported models (ONNX, OpenVINO, TorchScript, TensorRT) and the proof that they find what the checkpoint finds.

In: a checkpoint. Out: an exported model with its facts, a report. Read `conversion.py` first, then `proof.py`.
"""
