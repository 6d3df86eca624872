"""Predictions on a film or on the pictures of a camera: inference.py hands over to `main` if
`names_film`.

In: a film and a DJI drone's SRT file beside it. Out: the drawn film, predictions.jsonl. Read
`command.py` first.
"""

from yolo_seg_ddp.extras.film.command import main, names_film
