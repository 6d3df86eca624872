"""From the network's output to objects in a photograph: detections, tiles, joined masks, label
files.

In: a checkpoint or an exported model, photographs. Out: boxes and masks in the photograph's own
pixels, best first. Read `detections.py` first, then `tiles.py`.
"""
