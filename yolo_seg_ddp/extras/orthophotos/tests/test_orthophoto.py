"""Orthophotos: blocks, what is joined over them, map layers, killed runs and ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import torch

import inference
import parse_labels
from tests.commands import test_pretended_gpu as pretended_gpu
from tests.data.test_mask_rings import filled
from tests.predict.tile_scenes import Truth, iou_of, stroke
from tests.predict.tiny_network import tiny_weights
from tests.support.ranks import run_ranks
from tests.yolo.colour_network import NAMES, ColourNetwork, install, paint
from yolo_seg_ddp.data.images import FILL
from yolo_seg_ddp.data.label_shapes import long_axis
from yolo_seg_ddp.data.mask_rings import outline_of
from yolo_seg_ddp.extras.orthophotos import blocks as blocks_module
from yolo_seg_ddp.extras.orthophotos import map_layers
from yolo_seg_ddp.extras.orthophotos.__main__ import main
from yolo_seg_ddp.extras.orthophotos.blocks import (
    NO_GAPS,
    BlockPiece,
    cut_blocks,
    join_blocks,
    lines_of,
    piece_of,
)
from yolo_seg_ddp.extras.orthophotos.map_layers import BLOCKS, GEOJSON, GEOPACKAGE, write_orthophoto
from yolo_seg_ddp.extras.orthophotos.raster import open_orthophoto
from yolo_seg_ddp.extras.orthophotos.tests.rasters import CRS, ORIGIN, PIXEL_M, write_raster
from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.merge_tiles import MergedInstance
from yolo_seg_ddp.predict.postprocess import Context, MeanWithWhole, Step
from yolo_seg_ddp.predict.regions import Runs
from yolo_seg_ddp.predict.tiles import Predictor, Tiling, cut_tiles
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import UserError

pyogrio = pytest.importorskip("pyogrio")

SIZE = (1500, 900)
SMALL_BLOCK_PX = 720  # eight blocks
Whole = tuple[Path, dict[str, list[Any]], int]


@pytest.fixture(scope="module")
def truth() -> list[Truth]:
    """Two wires from corner to corner, a third with a bend, and poles: one in the part that two
    blocks share, one in four.
    """
    ways = [
        [(30, 860), (1470, 60)],
        [(30, 780), (1400, 20)],
        [(700, 880), (1000, 500), (1470, 500)],
    ]
    poles = [[(350, 60), (350, 200)], [(600, 640), (600, 780)], [(1100, 700), (1340, 700)]]
    return [
        *((0, stroke(SIZE, way, 8)) for way in ways),
        *((1, stroke(SIZE, way, 30)) for way in poles),
    ]


@dataclass(frozen=True)
class Strips(Step):
    """A line through the middle of each object of some classes, as the extra `wires` finds it."""

    classes: tuple[int, ...]

    def __call__(
        self, prediction: PhotoPrediction, context: Context, seen: None
    ) -> PhotoPrediction:
        lines = []
        for class_id, region in zip(prediction.class_ids, prediction.masks, strict=True):
            pixels = np.argwhere(region.mask)[:, ::-1] + (region.left + 0.5, region.top + 0.5)
            ends, _ = long_axis(pixels)
            width = len(pixels) / np.hypot(*(ends[1] - ends[0]))
            is_line = int(class_id) in self.classes
            lines.append(Line(ends, np.full(2, width), NO_GAPS) if is_line else None)
        return replace(prediction, lines=lines if self.classes else ())


def predictor_of(thin: tuple[int, ...] = ()) -> Predictor:
    limits = {"confidence": 0.25, "iou": 0.7}
    model = ColourNetwork()
    return Predictor(
        model,
        320,
        torch.device("cpu"),
        8,
        Tiling(320),
        limits,
        thin=thin,
        steps=(Strips(thin), MeanWithWhole(thin)),
    )


def predicted(
    folder: Path, raster: Path, predictor: Predictor | None = None
) -> dict[str, list[Any]]:
    """Predict on a raster; return the layers of the GeoPackage, geometries in pixels and columns,
    as pyogrio reads them.
    """
    model = folder / "model.pt"
    folder.mkdir(exist_ok=True)
    model.write_bytes(b"weights")
    photo = open_orthophoto(raster)
    ranks = distributed.read_rank_environment()
    write_orthophoto(predictor or predictor_of(), photo, model, NAMES, folder, ranks)
    layers = {}
    for layer in ("polygons", "lines"):
        facts, _, shapes, columns = pyogrio.raw.read(folder / GEOPACKAGE, layer=layer)
        assert facts["crs"] == CRS
        in_pixels = shapely.transform(shapely.from_wkb(shapes), photo.to_pixels)
        layers[layer] = [in_pixels, *columns]
    return layers


@contextmanager
def eight_blocks() -> Iterator[None]:
    """Let orthophotos be predicted by the network that sees colours, in eight blocks."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        patch.setattr(blocks_module, "LONGEST_BLOCK_PX", SMALL_BLOCK_PX)
        yield


@pytest.fixture(scope="module")
def whole(truth: list[Truth], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Predict the scene in eight blocks; return the folder, its layers, and how many views were
    computed.
    """
    folder, predictor, model = tmp_path_factory.mktemp("whole"), predictor_of(), ColourNetwork()
    raster = write_raster(folder / "a.tif", paint(truth, SIZE))
    with eight_blocks():
        return (
            folder,
            predicted(folder, raster, replace(predictor, model=model)),
            sum(model.batch_sizes),
        )


def drawn(shape: Any) -> np.ndarray:
    """Return the pixels whose centres lie in a polygon, bool (H, W)."""
    rings = [ring for part in shape.geoms for ring in (part.exterior, *part.interiors)]
    return filled([shapely.get_coordinates(ring)[:-1] for ring in rings], *SIZE[::-1])


@pytest.mark.parametrize("size", [(5000, 700), (640, 640), (20_000, 13_001), (5889, 5888)])
def test_blocks_cover_the_raster_and_share_tiles(size: tuple[int, int]) -> None:
    rows = cut_blocks(*size, Tiling(320))
    assert rows[-1][-1][2:] == size
    assert rows[0][0][:2] == (0, 0)
    for one, other in zip(rows[0], rows[0][1:], strict=False):
        assert one[2] - other[0] == 320
        tiles = [
            {tile[0] + block[0] for tile in cut_tiles(block[2] - block[0], 320 + block[3], 320)}
            for block in (one, other)
        ]
        assert one[2] - 320 in tiles[0] & tiles[1]
    assert max(block[2] - block[0] for block in rows[0]) <= blocks_module.LONGEST_BLOCK_PX


def test_a_raster_of_one_block_has_the_photographs_detections_to_the_pixel(
    truth: list[Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    photo = paint(truth, SIZE)
    ((*_, expected),) = predictor_of().predict([(0, photo)])
    shapes, names, scores, areas = predicted(tmp_path, write_raster(tmp_path / "a.tif", photo))[
        "polygons"
    ]
    order = np.argsort(-expected.detections.scores.numpy(), kind="stable")
    assert len(shapes) == len(order) >= 6
    assert names.tolist() == [NAMES[expected.class_ids[number]] for number in order]
    np.testing.assert_allclose(scores, expected.detections.scores.numpy()[order], atol=1e-5)
    for shape, number, area in zip(shapes, order, areas, strict=True):
        region = expected.masks[number]
        assert iou_of(region, drawn(shape)) == 1
        assert area == pytest.approx(region.mask.sum() * PIXEL_M**2 / 0.9996**2, rel=0.01)


def test_what_several_blocks_show_becomes_one_object(truth: list[Truth], whole: Whole) -> None:
    shapes, names, *_ = whole[1]["polygons"]
    assert len(shapes) == len(truth)
    for class_id, mask in truth:
        ious = [(drawn(shape) & mask).sum() / (drawn(shape) | mask).sum() for shape in shapes]
        assert max(ious) >= 0.99
        assert names[int(np.argmax(ious))] == NAMES[class_id]
    assert not (whole[0] / BLOCKS).exists()


def test_wires_are_lines_over_all_blocks_with_their_length_and_width_in_metres(
    truth: list[Truth], tmp_path: Path
) -> None:
    raster = write_raster(tmp_path / "a.tif", paint(truth[:2], SIZE))
    with eight_blocks():
        layers = predicted(tmp_path, raster, predictor_of(thin=(0,)))
    assert not len(layers["polygons"][0])
    shapes, names, _, lengths, widths = layers["lines"]
    assert names.tolist() == ["wire", "wire"]
    for ends in ([(30, 860), (1470, 60)], [(30, 780), (1400, 20)]):
        expected = shapely.LineString(ends)
        nearest = int(np.argmin([shape.hausdorff_distance(expected) for shape in shapes]))
        assert shapes[nearest].hausdorff_distance(expected) < 6
        assert lengths[nearest] == pytest.approx(expected.length * PIXEL_M, rel=0.01)
        assert widths[nearest] == pytest.approx(8 * PIXEL_M, rel=0.2)
    collection = json.loads((tmp_path / GEOJSON).read_text())
    assert len(collection["features"]) == 2
    longitude, latitude = collection["features"][0]["geometry"]["coordinates"][0]
    assert (longitude, latitude) == (pytest.approx(15.0, abs=1e-3), pytest.approx(47.85, abs=5e-3))
    assert ORIGIN[0] == 500_000  # on the zone's middle meridian, 15 degrees east


def test_tiles_without_photograph_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    photo = np.full((900, 1500, 3), 20, np.uint8)
    photo[:, 400:] = 0
    predictor, model = predictor_of(), ColourNetwork()
    predicted(
        tmp_path, write_raster(tmp_path / "a.tif", photo, nodata=0), replace(predictor, model=model)
    )
    assert sum(model.batch_sizes) == 16  # 1 + 5 x 3 of 41 views
    assert FILL != 0


def test_a_killed_run_goes_on_and_writes_the_same_files(
    whole: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    computed: list[int] = []
    compute = map_layers.predict_block

    def counts(
        predictor: Predictor, photo: np.ndarray, number: int, *rest: Any
    ) -> list[BlockPiece]:
        if number == 2 and computed == [0, 1]:
            raise UserError("killed")
        computed.append(number)
        return compute(predictor, photo, number, *rest)

    monkeypatch.setattr(map_layers, "predict_block", counts)
    with eight_blocks():
        with pytest.raises(UserError, match="killed"):
            predicted(tmp_path, whole[0] / "a.tif")
        assert not (tmp_path / GEOJSON).exists()
        (tmp_path / BLOCKS / "0.npz").write_bytes(b"half")  # a damaged block is made again
        predicted(tmp_path, whole[0] / "a.tif")
    assert "1 of 8 blocks are there" in capsys.readouterr().out
    assert computed == [0, 1, 0, *range(2, 8)]
    assert (tmp_path / GEOJSON).read_bytes() == (whole[0] / GEOJSON).read_bytes()


def test_blocks_of_other_options_are_not_taken_over(tmp_path: Path) -> None:
    done = blocks_module.FinishedBlocks(tmp_path / BLOCKS, "0.25")
    assert done.prepare(3) == []
    done.save(1, [])
    assert done.prepare(3) == [1]
    assert blocks_module.FinishedBlocks(tmp_path / BLOCKS, "0.5").prepare(3) == []


def test_objects_are_complete_as_soon_as_no_further_row_can_change_them() -> None:
    rows = [[(0, top, 100, top + 60)] for top in (0, 40, 80)]

    def load(number: int) -> list[BlockPiece]:
        top = rows[number][0][1]
        spots = [
            top + 10,
            *([top + 32, top + 45] if number < 2 else []),
            *([top + 5] if number else []),
        ]
        masks = [Runs.of(np.ones((8, 8), bool), 20, spot) for spot in spots]
        return [piece_of(number, 0, 0.9, mask) for mask in masks]

    after_row = [[thing.corners[1] for thing in things] for things in join_blocks(rows, load)]
    assert after_row == [[10], [32, 45, 50], [72, 85, 90]]  # 32 to 40 touches the next row


@pytest.mark.parametrize(("below_px", "num_objects"), [(1, 1), (3, 2)])
def test_a_hair_that_the_next_block_shows_beside_is_one(below_px: int, num_objects: int) -> None:
    hairs = [Runs.of(np.ones((1, 80), bool), 10, top) for top in (44, 44 + below_px)]
    rows = [[(0, 0, 100, 60)], [(0, 40, 100, 100)]]
    found = list(join_blocks(rows, lambda number: [piece_of(number, 0, 0.9, hairs[number])]))
    assert [len(things) for things in found] == [0, num_objects]


def test_a_wires_width_is_the_mean_over_its_length() -> None:
    ends, mask = ((0.0, 300.0, 10.0), (250.0, 400.0, 4.0)), Runs.of(np.ones((4, 4), bool))
    lines = [
        Line(np.array([[low, 50], [high, 50]]), np.full(2, width), NO_GAPS)
        for low, high, width in ends
    ]
    ((points, width),) = lines_of(
        MergedInstance(tuple(piece_of(n, 0, 0.9, mask, line) for n, line in enumerate(lines)))
    )
    assert [np.ptp(points[:, 0]), width] == pytest.approx([400, (300 * 10 + 100 * 4) / 400])


def test_outlines_hold_the_centres_of_the_masks_pixels_and_leave_out_holes() -> None:
    canvas = np.zeros(SIZE[::-1], bool)
    canvas[100:140, 200:260] = np.random.default_rng(0).random((40, 60)) < 0.6
    np.testing.assert_array_equal(drawn(outline_of(canvas)), canvas)


def _on_a_rank(source: Path, folder: Path) -> tuple[bytes, int]:
    photo, ranks = open_orthophoto(source / "a.tif"), distributed.read_rank_environment()
    predictor, model = predictor_of(), ColourNetwork()
    with eight_blocks():
        write_orthophoto(
            replace(predictor, model=model), photo, source / "model.pt", NAMES, folder, ranks
        )
    distributed.barrier()
    return (folder / GEOJSON).read_bytes(), sum(model.batch_sizes)


def test_two_ranks_write_what_one_writes(truth: list[Truth], whole: Whole, tmp_path: Path) -> None:
    alone, num_views = (whole[0] / GEOJSON).read_bytes(), whole[2]
    first, second = run_ranks(_on_a_rank, 2, whole[0], tmp_path)
    assert alone == first[0] == second[0]
    assert len(json.loads(alone)["features"]) == len(truth)
    assert 0 < first[1] < num_views
    assert first[1] + second[1] == num_views


def test_the_command_predicts_and_photographs_commands_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_raster(
        tmp_path / "a.tif", paint([(1, stroke((700, 500), [(0, 60), (699, 80)], 8))], (700, 500))
    )
    monkeypatch.setattr(
        "yolo_seg_ddp.predict.opening.open_model", lambda *given, **named: ColourNetwork()
    )
    flags = [
        "--model",
        "x.pt",
        "--source",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    (tmp_path / "x.pt").write_bytes(b"a stand-in")
    with eight_blocks():
        assert main([*flags, "--img-size", "320"]) == 0
    said = capsys.readouterr().out
    assert "700 x 500 pixels; found 1 " in said
    assert (tmp_path / "out" / GEOPACKAGE).exists()
    for run, place in ((inference.main, "--source"), (parse_labels.main, "--input")):
        monkeypatch.setattr(
            "sys.argv", ["script", *(flags if place == "--source" else (place, str(source)))]
        )
        with pytest.raises(
            UserError,
            match=rf"^{place} .*a\.tif: an orthophoto; python -m yolo_seg_ddp orthophotos",
        ):
            run()
    monkeypatch.setattr("sys.argv", ["parse_labels.py"])
    with pytest.raises(SystemExit):
        parse_labels.main(["--labels", "poles.geojson"])
    assert (
        "unknown argument --labels; python -m yolo_seg_ddp orthophotos.cut reads labels of"
        in capsys.readouterr().err
    )


def test_the_command_runs_on_a_gpu(tmp_path: Path) -> None:
    source = write_raster(
        tmp_path / "a.tif", paint([(1, stroke((200, 150), [(0, 60), (199, 80)], 8))], (200, 150))
    )
    model = tiny_weights(tmp_path / "best.pt")
    line = f"--model {model} --source {source} --output {tmp_path}/out --tiles 96 --conf 0.001"
    (seen,) = pretended_gpu.run(tmp_path, 1, "yolo_seg_ddp.extras.orthophotos.__main__", line)
    assert seen["code"] == 0, (tmp_path / "printed.txt").read_text()
    assert seen["copies"] > 0
    assert (tmp_path / "out" / GEOPACKAGE).exists()
