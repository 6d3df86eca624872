"""Lines of thin objects, such as wires: from a mask to a centreline with a width, and back to the
mask that it draws.

In: masks with a class and a confidence, the photograph, and what the labels of the training say
(`label_facts.py`). Out: lines with a confidence of their own. `numbers.py` holds the numbers of the
room. Read `line.py`, then `replacing.py`.
"""
