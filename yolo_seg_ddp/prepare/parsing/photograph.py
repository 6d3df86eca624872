"""Converts one photograph to a small upright JPEG, and its label rows to YOLO-seg text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from yolo_seg_ddp.data.images import (
    Stretch,
    decode_image,
    encode_jpeg,
    exif_orientation,
    is_jpeg,
    points_upright,
    resize_area,
    scaled_size,
    time_taken,
    upright_size,
)
from yolo_seg_ddp.data.labels import ANY_CLASS, format_yolo_label
from yolo_seg_ddp.prepare.near_duplicates import (
    MEASURED_PX,
    UNIFORM_CONTRAST,
    signature,
    small_grey,
    thumbnail,
)
from yolo_seg_ddp.prepare.parsing.label_csv import ClassTable, LabelObject, LabelRow, count_objects
from yolo_seg_ddp.prepare.parsing.outlines import OutlineError, ShapeObject, object_ring
from yolo_seg_ddp.prepare.parsing.rows import (
    CLOSED,
    NO_OBJECTS,
    POLYLINE,
    ObjectCounts,
    Row,
    digest_of,
    is_ignored,
)
from yolo_seg_ddp.utils.text import counted

JPEG_QUALITY = 95
LEAST_SIDE = 1e-6  # of a box, the least that a label file can say
SIMPLIFY_OUTPUT_PX = 0.25  # less than a mask can show
# an outline fits a frame if it exceeds it by at most this share of the longer side
FRAME_SLACK = 0.01
EXIF_FRAME_CHOICES = ("auto", "upright", "stored")
UNUSABLE_OBJECT = "unusable object"
MENDED_OBJECT = "mended object"
UNKNOWN_CLASS = "unknown class"
AnyObject = LabelObject | ShapeObject


@dataclass(frozen=True)
class PhotographOptions:
    """The options that affect the bytes of an output image and its label."""

    class_names: tuple[str, ...]
    long_side_px: int
    line_width_px: float
    exif_frame: str
    stretch: Stretch | None = None  # of photographs of more than 8 bits
    boxes: tuple[str, ...] = ()  # classes whose outlines are boxes

    def image_fingerprint(self, stamp: str) -> str:
        stretch = [repr(self.stretch)] if self.stretch else []
        return _fingerprint("image-1", stamp, str(self.long_side_px), str(JPEG_QUALITY), *stretch)

    def label_fingerprint(self, image_fingerprint: str, row_digests: Sequence[str]) -> str:
        settings = (repr(float(self.line_width_px)), self.exif_frame, *self.class_names)
        boxes = ["boxes", *self.boxes]
        return _fingerprint("label-3", image_fingerprint, *settings, *boxes, *row_digests)


@dataclass(frozen=True)
class ImageMetadata:
    """Sizes in pixels; `width` and `height` are those of the original, upright.

    signature: see `near_duplicates`, in hexadecimal digits; empty for a picture of one colour.
    taken: EXIF's local time as ISO 8601, or empty. levels: the different values of green, before it
    was shrunk.
    """

    width: int
    height: int
    orientation: int
    output_width: int
    output_height: int
    signature: str
    taken: str
    levels: int


@dataclass
class LabelResult:
    """A photograph's label text, counts of its objects, and (row index, kind, text) of everything
    skipped.

    ignored_text, ignored: the text and counts of its regions to ignore; the class is empty for all
    classes. lost: the number of unusable objects of each class; the class is empty if the file does
    not tell it. counts: see `AnnotationRow`. merged: objects that became a part of another one, or
    repeat one, by their class in the file.
    """

    text: str = ""
    ignored_text: str = ""
    objects: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    unknown_values: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    counts: ObjectCounts = field(default_factory=Counter)
    merged: Counter[str] = field(default_factory=Counter)
    exif_frame: str = ""
    complaints: list[tuple[int, str, str]] = field(default_factory=list)


def build_image(
    data: bytes, long_side_px: int, stretch: Stretch | None = None
) -> tuple[bytes, ImageMetadata]:
    """Return the upright JPEG with a longer side of at most `long_side_px`; never enlarge. Raises
    ImageError.

    A JPEG that is already small and upright keeps its bytes.
    """
    width, height = upright_size(data)
    orientation = exif_orientation(data)
    # also if its bytes are kept: decoding finds damage
    image = decode_image(data, long_side_px, stretch=stretch)
    scale = min(1.0, long_side_px / max(width, height))
    output_width, output_height = scaled_size(width, height, scale)
    levels = len(
        np.unique(image[:: max(1, len(image) // 512), :: max(1, image.shape[1] // 512), 1])
    )
    image = resize_area(image, output_width, output_height)
    is_kept = scale == 1.0 and orientation == 1 and is_jpeg(data)
    jpeg = data if is_kept else encode_jpeg(image, JPEG_QUALITY)
    # as check_data.py does, so that both find the same copies
    grey = small_grey(decode_image(jpeg, MEASURED_PX))
    metadata = ImageMetadata(
        width,
        height,
        orientation,
        output_width,
        output_height,
        signature(thumbnail(grey)).hex() if grey.std() >= UNIFORM_CONTRAST else "",
        taken.isoformat() if (taken := time_taken(data)) else "",
        levels,
    )
    return jpeg, metadata


def build_label(
    rows: Sequence[Row], metadata: ImageMetadata, options: PhotographOptions, classes: ClassTable
) -> LabelResult:
    """Return the YOLO-seg label of a photograph's rows.

    Raises LabelError when a row is unreadable.
    """
    result = LabelResult()
    objects: list[tuple[int, AnyObject]] = []
    for row, source in enumerate(rows):
        parsed, complaints = source.parse()
        result.counts += (
            count_objects(parsed, complaints) if isinstance(source, LabelRow) else source.counts
        )
        objects += [(row, item) for item in parsed if item.value not in NO_OBJECTS]
        result.complaints += [(row, UNUSABLE_OBJECT, complaint) for complaint in complaints]
        result.lost[""] += len(complaints)
    result.merged = Counter(item.value for _, item in objects)
    if len(rows) > 1:
        objects = _without_copies(objects)
    result.merged -= Counter(item.value for _, item in objects)
    for shape in (item for _, item in objects if isinstance(item, ShapeObject)):
        result.merged[shape.value] += shape.members - 1
        result.counts[shape.value, POLYLINE] -= shape.closed
        result.counts[shape.value, CLOSED] += shape.closed
    result.exif_frame = choose_exif_frame(
        [item for _, item in objects], metadata, options.exif_frame
    )
    instances, regions = list[tuple[int, np.ndarray]](), list[tuple[int, np.ndarray]]()
    for row, item in objects:
        value = "" if is_ignored(item.value) else item.value
        is_region = value != item.value or (isinstance(item, ShapeObject) and item.is_region)
        class_id = ANY_CLASS if is_region and not value else classes.find(value)
        if class_id is None:
            result.unknown_values[item.value] += 1
            continue
        name = "" if class_id == ANY_CLASS else classes.names[class_id]
        try:
            ring, complaint = _normalised_ring(item, metadata, result.exif_frame, options)
            if (
                (isinstance(item, ShapeObject) and item.is_box) or name in options.boxes
            ) and not is_region:
                # A row of four numbers: the centre, and the width and height.
                low, high = ring.min(0), ring.max(0)
                ring = np.stack([(low + high) / 2, np.maximum(high - low, LEAST_SIDE)])
            (regions if is_region else instances).append((class_id, ring))
            (result.ignored if is_region else result.objects)[name] += 1
            kind = MENDED_OBJECT
        except OutlineError as error:
            complaint, kind = str(error), UNUSABLE_OBJECT
            result.lost[name] += bool(name)
        if complaint:
            shown = f"{item.name} ({item.value})" if isinstance(item, ShapeObject) else item.value
            result.complaints.append((row, kind, f"{shown}: {complaint}"))
    for value, count in sorted(result.unknown_values.items()):
        row = next(row for row, item in objects if item.value == value)
        result.complaints.append(
            (row, UNKNOWN_CLASS, f"`{value}` ({counted(count, 'object')}) is none of the classes")
        )
    result.text, result.lost = format_yolo_label(instances), +result.lost
    result.ignored_text = format_yolo_label(regions)
    result.merged = Counter(
        {label: number for label, number in (+result.merged).items() if not is_ignored(label)}
    )
    result.counts = +result.counts
    return result


def choose_exif_frame(
    objects: Sequence[AnyObject], metadata: ImageMetadata, exif_frame: str
) -> str:
    """Return the frame of the outlines: `upright`, `stored`, or `ambiguous` (then treated as
    upright).

    It is not documented whether the labelling tool applied the EXIF orientation. `auto` chooses the
    frame that contains the outlines, if only one does; of half turns and mirrored photographs both
    do. The image's size in an annotation file decides, too. Raises LabelError if that is the size
    of another photograph.
    """
    objects = [item for item in objects if not isinstance(item, ShapeObject) or not item.error]
    shapes = [item for item in objects if isinstance(item, ShapeObject)]
    frames = {
        item.frame((metadata.width, metadata.height), metadata.orientation, exif_frame)
        for item in shapes
    }
    if frames:
        return frames.pop() if len(frames) == 1 else "ambiguous"
    if metadata.orientation == 1:
        return "upright"
    if exif_frame != "auto":
        return exif_frame
    if not objects or metadata.orientation < 5 or metadata.width == metadata.height:
        return "ambiguous"
    drawn = [item.points for item in objects if isinstance(item, LabelObject)]
    right, bottom = np.concatenate(drawn).max(axis=0, initial=0.0)
    slack = FRAME_SLACK * max(metadata.width, metadata.height)
    fits_upright = right <= metadata.width + slack and bottom <= metadata.height + slack
    fits_stored = right <= metadata.height + slack and bottom <= metadata.width + slack
    if fits_upright == fits_stored:
        return "ambiguous"
    return "upright" if fits_upright else "stored"


def _normalised_ring(
    item: AnyObject, metadata: ImageMetadata, frame: str, options: PhotographOptions
) -> tuple[np.ndarray, str]:
    """Return an object's ring in 0..1, and a message about lost parts, usually empty."""
    size = (metadata.width, metadata.height)
    if isinstance(item, ShapeObject):
        ring, complaint = item.ring(size, metadata.orientation, frame, options.line_width_px)
        return ring / size, complaint or item.note
    points = item.points
    if frame == "stored":
        points = points_upright(points, metadata.orientation, metadata.width, metadata.height)
    tolerance_px = SIMPLIFY_OUTPUT_PX * metadata.width / metadata.output_width
    return object_ring(item.kind, points, size, options.line_width_px, tolerance_px) / size, ""


def _without_copies(objects: list[tuple[int, AnyObject]]) -> list[tuple[int, AnyObject]]:
    """Drop objects that are equal to an earlier one of the photograph (EPRI's rows only)."""
    unique: dict[tuple[object, ...], tuple[int, AnyObject]] = {}
    for number, (row, item) in enumerate(objects):
        key: tuple[object, ...] = (number,)
        if isinstance(item, LabelObject):
            key = (item.value, item.kind, item.points.tobytes())
        unique.setdefault(key, (row, item))
    return list(unique.values())


def _fingerprint(*parts: str) -> str:
    return digest_of("\0".join(parts).encode("utf-8", "surrogateescape")).hex()
