"""From a stranger's files to a YOLO data set: download, label formats, the drawn sample, copies of
a photograph.

In: archives, photographs, label files of several tools. Out: a folder with `dataset.yaml` and a
manifest. Read `parsing/build.py` first.
"""
