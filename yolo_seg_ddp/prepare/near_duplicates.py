"""Finds photographs that show the same picture. Small signatures propose pairs; aligned fine detail
decides.

Photographs of one kind, such as retinas or a field, have similar signatures. Therefore the two
pictures of a proposed pair are aligned (mirrored, rotated or cropped, if needed), and their fine
detail is compared without brightness. Each of 64 parts is compared too, because different
photographs of a fixed camera have the same background.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from yolo_seg_ddp.data.images import fit_long_side
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.threads import ordered_map

MEASURED_PX = 512  # long side to which a photograph is shrunk first
THUMB_PX = 96  # side of the square grey picture that photographs are compared on
# standard deviation of the grey values; below it there is no detail to compare
UNIFORM_CONTRAST = 4.0
SIGNATURE_PX = 12
SIGNATURE_BYTES = SIGNATURE_PX**2
# correlation of two signatures from which a pair is proposed; copies cropped by 5 % have 0.73 and
# more
LIKELY = 0.75
MOST_PAIRS = 30_000  # compared, about three minutes of a core; at least FEWEST of each photograph
FEWEST = 4
MIN_SIMILARITY = 0.6  # correlation of aligned fine detail
# of a part's detail; an object in only one of the two pictures gives 0.54 and more
MAX_DIFFERENCE = 0.5
PARTS = 8  # to a side
LITTLE_DETAIL = 0.5 / PARTS**2  # of a part, in the detail of the whole: noise differs
DETAIL_SIGMA_PX = 2.0  # coarser structures are left out
# grey values beyond which there is no detail, such as around a round picture
DARK, BRIGHT = 12, 250
MARGIN_PX = 6  # around such pixels, and half of it around a picture's edge, detail is not compared
MIN_COMPARED = 0.2  # of the picture that remains; else dark pixels count, too
MIN_SHOWN = 0.4  # of a picture that the other one must show
MOST_SHOWN = 0.9  # below it, the pictures overlap but are no copies
# tried along each axis
CROPS = [(1.0, 0.0)] + [(scale, offset) for scale in (0.95, 0.9) for offset in (0.0, 0.5, 1.0)]
COARSE_PX = 32  # side at which they are tried
# correlation at that side, below which a pair is left out; cropped copies have 0.84 and more
COARSE_LIKENESS = 0.7
BLOCK = 128  # photographs compared with all others at a time
SAME_PLACE = np.eye(2, 3, dtype=np.float32)


def small_grey(image: np.ndarray) -> np.ndarray:
    """Return an RGB picture in grey, uint8, with a long side of at most MEASURED_PX."""
    return fit_long_side(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), MEASURED_PX)


def thumbnail(grey: np.ndarray) -> np.ndarray:
    """Return the picture uint8 (THUMB_PX, THUMB_PX) that photographs are compared on."""
    return cv2.resize(grey, (THUMB_PX, THUMB_PX), interpolation=cv2.INTER_AREA)


def signature(thumb: np.ndarray) -> bytes:
    """Return a photograph's signature, which proposes pairs: a very small thumbnail of
    SIGNATURE_BYTES bytes.
    """
    small = cv2.resize(thumb, (SIGNATURE_PX, SIGNATURE_PX), interpolation=cv2.INTER_AREA)
    return cv2.GaussianBlur(small, (0, 0), 0.7).tobytes()


def orientations(picture: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a square picture (S, S) in its eight orientations: turned by quarters, and mirrored."""
    for turns in range(4):
        turned = np.rot90(picture, turns)
        yield turned
        yield turned[:, ::-1]


@dataclass(frozen=True)
class Likeness:
    """How alike two aligned pictures are."""

    similarity: float = 0.0  # the correlation of their fine detail
    difference: float = 9.0  # the largest one of any of the 64 parts
    # the share of a picture that the other one shows; the larger of the two shares
    shown: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether both show the same in their overlap."""
        return self.similarity >= MIN_SIMILARITY and self.difference <= MAX_DIFFERENCE

    @property
    def is_copy(self) -> bool:
        """Whether one is a copy of the other, perhaps cropped."""
        return self.is_same and self.shown >= MOST_SHOWN


def likeness(first: np.ndarray, second: np.ndarray) -> Likeness:
    """Compare two thumbnails, each uint8 (THUMB_PX, THUMB_PX), in the orientation of the best
    agreement of their signatures.
    """
    one = first.astype(np.float32)
    mine = _unit(np.frombuffer(signature(first), np.uint8))
    turned = [np.ascontiguousarray(two) for two in orientations(second)]
    alike = [float(mine @ _unit(np.frombuffer(signature(two), np.uint8))) for two in turned]
    two = turned[int(np.argmax(alike))].astype(np.float32)
    best = _compare(one, two, SAME_PLACE)
    if best.is_copy:
        return best
    crop, coarse = _best_crop(one, two)
    if coarse < COARSE_LIKENESS:
        return best
    tried = [best, *(_compare(one, two, place) for place in (crop, _refined(one, two, crop)))]
    return max(tried, key=lambda one: one.similarity - one.difference)


def is_same_frame(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether thumbnails show the same, and neither is turned, mirrored or cropped."""
    return _compare(first.astype(np.float32), second.astype(np.float32), SAME_PLACE).is_copy


def _compare(one: np.ndarray, two: np.ndarray, place: np.ndarray) -> Likeness:
    """Compare pictures float32 (S, S); place (2, 3) maps points of the first to the second."""
    size = one.shape[::-1]
    moved = cv2.warpAffine(two, place, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    seen = cv2.warpAffine(
        np.ones_like(two), place, size, flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    )
    share = float(seen.mean())
    shown = max(share, share * abs(float(np.linalg.det(place[:, :2]))))
    inside = cv2.erode(seen, np.ones((MARGIN_PX - 1,) * 2)) > 0
    compared = inside & ~_near(
        (np.minimum(one, moved) < DARK) | (np.maximum(one, moved) > BRIGHT), MARGIN_PX
    )
    if compared.mean() < MIN_COMPARED:
        compared = inside & ~_near(np.maximum(one, moved) > BRIGHT, 1)
    if share < MIN_SHOWN or compared.mean() < MIN_COMPARED:
        return Likeness(shown=shown)
    first, second = (_parts(_detail(picture, compared)) for picture in (one, moved))
    product = (first * second).sum(axis=1)
    detail = (first**2).sum(axis=1) + (second**2).sum(axis=1)
    difference = (detail - 2 * product) / (detail + LITTLE_DETAIL)
    return Likeness(float(product.sum()), float(difference.max()), shown)


def _near(pixels: np.ndarray, distance_px: int) -> np.ndarray:
    return cv2.dilate(pixels.view(np.uint8), np.ones((2 * distance_px + 1,) * 2, np.uint8)) > 0


def _detail(picture: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """Return the fine detail of some pixels, of length 1 in all, and
    0 elsewhere: float32 (S, S).
    """
    fine = picture - cv2.GaussianBlur(picture, (0, 0), DETAIL_SIGMA_PX)
    fine = np.where(compared, fine - fine[compared].mean(), 0)
    return fine / max(float(np.linalg.norm(fine)), 1e-6)


def _parts(picture: np.ndarray) -> np.ndarray:
    side = len(picture) // PARTS
    return picture.reshape(PARTS, side, PARTS, side).transpose(0, 2, 1, 3).reshape(PARTS**2, -1)


@functools.cache
def _crops() -> list[np.ndarray]:
    """Return places, in pixels of COARSE_PX, at which one picture may be a part of the other."""
    places = []
    for scale_x, offset_x in CROPS:
        for scale_y, offset_y in CROPS:
            shift = offset_x * (1 - scale_x) * COARSE_PX, offset_y * (1 - scale_y) * COARSE_PX
            place = np.array([[scale_x, 0, shift[0]], [0, scale_y, shift[1]]], np.float32)
            places += [place, cv2.invertAffineTransform(place)]
    return places


def _best_crop(one: np.ndarray, two: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the place (2, 3) among `_crops` at which the pictures correlate most, in pixels of the
    first, and how much.
    """
    small = [
        cv2.GaussianBlur(cv2.resize(p, (COARSE_PX,) * 2, interpolation=cv2.INTER_AREA), (0, 0), 0.8)
        for p in (one, two)
    ]
    first, second = (picture - cv2.GaussianBlur(picture, (0, 0), 4.0) for picture in small)
    inner = slice(COARSE_PX // 8, -COARSE_PX // 8)
    target, flags = _unit(first[inner, inner]), cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    moved = [
        cv2.warpAffine(
            second, place, (COARSE_PX,) * 2, flags=flags, borderMode=cv2.BORDER_REPLICATE
        )
        for place in _crops()
    ]
    alike = [float(target @ _unit(picture[inner, inner])) for picture in moved]
    place = _crops()[int(np.argmax(alike))].copy()
    place[:, 2] *= len(one) / COARSE_PX
    return place, max(alike)


def _refined(one: np.ndarray, two: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return a better place (2, 3), by OpenCV's enhanced correlation (Evangelidis and Psarakis,
    2008).
    """
    for side_px in (len(one) // 2, len(one)):
        first, second = (
            cv2.resize(picture, (side_px,) * 2, interpolation=cv2.INTER_AREA)
            for picture in (one, two)
        )
        tried, scale = place.copy(), side_px / len(one)
        tried[:, 2] *= scale
        criteria = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 1e-4)
        try:
            _, tried = cv2.findTransformECC(
                first, second, tried, cv2.MOTION_AFFINE, criteria, None, 3
            )  # type: ignore[call-overload]
        except cv2.error:  # the pictures have nothing in common
            return place
        tried[:, 2] /= scale
        place = tried
    return place


def _unit(values: np.ndarray) -> np.ndarray:
    """Return values (n,) without their mean, of length 1."""
    flat = values.astype(np.float32).ravel()
    flat -= flat.mean()
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def same_pictures(
    digests: Sequence[Hashable],
    signatures: Sequence[bytes],
    read_thumbs: Callable[[Sequence[int]], np.ndarray],
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return a number for each photograph, int64 (N,), and neighbours. Photographs of the same
    picture have equal numbers.

    Neighbours are pairs of positions of photographs that only overlap, such as frames of one
    flight. Equal digests mean equal files. A picture without detail has an empty signature; only an
    equal file shows the same. `read_thumbs` returns the thumbnails (n, THUMB_PX, THUMB_PX) of the
    photographs at n positions.
    """
    first: dict[Hashable, int] = {}
    groups = np.array(
        [first.setdefault(digest, number) for number, digest in enumerate(digests)], np.int64
    )
    chosen = np.array(
        [number for number, one in enumerate(signatures) if one and groups[number] == number],
        np.int64,
    )
    neighbours: list[tuple[int, int]] = []
    if len(chosen) < 2:
        return groups, neighbours
    pairs = chosen[likely_pairs([signatures[number] for number in chosen])]
    thumbs = functools.lru_cache(maxsize=4096)(lambda position: read_thumbs([position])[0])

    # in an order that does not depend on that of the photographs
    def compared(pair: np.ndarray) -> Likeness:
        return likeness(*sorted(map(thumbs, pair.tolist()), key=lambda thumb: thumb.tobytes()))

    compare = ordered_map(compared, pairs, usable_cpu_count())
    compare = Progress("pairs of photographs that may show the same", len(pairs))(compare)
    for (one, two), comparison in zip(pairs.tolist(), compare, strict=True):
        if comparison.is_copy:
            groups[groups == max(groups[one], groups[two])] = min(groups[one], groups[two])
        elif comparison.is_same:
            neighbours.append((one, two))
    return groups, neighbours


def likely_pairs(signatures: Sequence[bytes]) -> np.ndarray:
    """Return the pairs p < q of correlated signatures, int64 (n, 2): the best of each photograph;
    the best pair first.
    """
    table = np.frombuffer(b"".join(signatures), np.uint8).reshape(-1, SIGNATURE_PX, SIGNATURE_PX)
    turned = [
        np.stack([_unit(picture) for picture in pictures])
        for pictures in zip(*map(orientations, table), strict=True)
    ]
    most = min(max(MOST_PAIRS // len(table), FEWEST), len(table) - 1)
    tables = [np.zeros((0, 3))]
    for start in range(0, len(table), BLOCK):
        mine = np.arange(start, min(start + BLOCK, len(table)))
        alike = np.max([turned[0][mine] @ others.T for others in turned], axis=0)
        alike[np.arange(len(mine)), mine] = -1
        best = np.argpartition(-alike, most - 1, axis=1)[:, :most]
        scores = np.take_along_axis(alike, best, axis=1)
        rows, columns = np.nonzero(scores >= LIKELY)
        pair = np.sort(np.stack([mine[rows], best[rows, columns]], axis=1), axis=1)
        tables.append(np.column_stack([pair, scores[rows, columns]]))
    table_of = np.concatenate(tables)
    _, kept = np.unique(table_of[:, :2], axis=0, return_index=True)
    table_of = table_of[kept]
    return table_of[np.lexsort((table_of[:, 1], table_of[:, 0], -table_of[:, 2]))][:, :2].astype(
        np.int64
    )
