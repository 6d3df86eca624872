"""Reads RSML, the root system markup language: each root of a plant is a line
(https://rootsystemml.github.io).
"""

from collections import Counter
from pathlib import Path
from xml.parsers import expat

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES
from yolo_seg_ddp.extras.labels.cvat import MAX_DEPTH, Attributes, bounded_parser
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile, first_element
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject, read_points
from yolo_seg_ddp.prepare.parsing.rows import POLYLINE, AnnotationRow, Parsed
from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.files import read_bytes

MAX_BYTES = 32_000_000
# classes of a root, and of roots that grow from another, if `label` is no kind of root
ORDERS = ("primary", "lateral")
KINDS = (*ORDERS, "secondary", "tertiary", "seminal", "nodal", "crown", "basal", "adventitious")


class RsmlFile(LabelFile):
    """The roots in one photograph, which has the file's name.

    Raises UserError when it is not RSML.
    """

    format = "rsml"
    title = "RSML"
    patterns = ("**/*.rsml",)
    how_to_export = "save each photograph's roots as NAME.rsml"
    lists_used_classes = True
    named_by = "label or order"

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        try:
            data = read_bytes(path, MAX_BYTES)
            objects, _ = read_roots(data)
        except (expat.ExpatError, ValueError) as error:
            raise UserError(f"{path}: not RSML: {one_line(error, 200)}") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        self.names = {shape.value: None for shape in objects}
        photographs = tuple(f"{path.stem}{suffix}" for suffix in IMAGE_SUFFIXES)
        counts = Counter((shape.value, POLYLINE) for shape in objects)
        self.rows = [AnnotationRow(photographs, path, [data], "", read_roots, counts)]

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        return file.suffix.lower() == ".rsml" and first_element(file) == "rsml"


def read_roots(data: bytes) -> Parsed:
    """Return the roots of a file as lines, and messages about those left out.

    Raises ExpatError and ValueError.
    """
    objects: list[ShapeObject] = []
    tags: list[str] = []
    # those that are open: class, and x and y of the points in turn
    roots: list[tuple[str, list[float]]] = []

    def start(tag: str, given: Attributes) -> None:
        tags.append(tag.lower())
        if len(tags) > MAX_DEPTH or tags[0] != "rsml":
            raise ValueError("it begins with another element than <rsml>, or is nested too deeply")
        if tags[-1] == "root":
            kind = given.get("label", "").strip().lower()
            roots.append((kind if kind in KINDS else ORDERS[min(len(roots), 1)], []))
        elif tags[-1] == "point" and "geometry" in tags and "functions" not in tags and roots:
            roots[-1][1].extend(float(given[axis]) for axis in ("x", "y"))

    def end(_: str) -> None:
        if tags.pop() == "root":
            kind, points = roots.pop()
            name = f"root {len(objects) + 1}"
            try:
                objects.append(
                    ShapeObject(kind, name, parts=(read_points(points, "line"),), is_line=True)
                )
            except ValueError as error:
                objects.append(ShapeObject(kind, name, error=str(error)))

    try:
        bounded_parser(start, end, lambda _: None).Parse(data, True)
    except KeyError as error:
        raise ValueError(f"a point has no {error}") from error
    return objects, []
