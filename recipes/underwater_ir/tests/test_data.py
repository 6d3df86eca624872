"""The default data, pseudo-labels, pairs of files, and the samples of a data set."""

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler
from underwater_ir.commands.export_pseudo_labels import import_scores
from underwater_ir.commands.make_data import find_photographs, write_png
from underwater_ir.data import water
from underwater_ir.data.datasets import (
    RestorationDataset,
    benchmark_entries,
    create_evaluation_loader,
    create_paired_train_loader,
    shares_by_scene,
    train_entries,
)
from underwater_ir.data.pseudo_labels import PROMPTS, describe, label_from, read_label

from recipes.underwater_ir.tests.small import SIZE_PX, photograph
from tests.support.recipes import assert_refused
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save

SHAPE = (10, 20, 10, 0)


def write_pairs(root: Path, labels: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        for folder in ("input", "target"):
            write_png(root / folder / name, photograph(number))
        atomic_torch_save(describe(photograph(number)), (labels / name).with_suffix(".pt"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_pairs(
        tmp_path / "train", tmp_path / "labels", ("a.png", "deep/b.png", "c.png", "d.png", "e.png")
    )
    return tmp_path


def test_far_things_take_the_colour_of_the_water() -> None:
    """At a great range only the veil is left; its channels are as the attenuations say, and the
    nearest is untouched.
    """
    scene = water.Water("II", 0.0, 0.5)
    rng = np.random.default_rng(0)
    photo = photograph(1)
    near = water.submerge(photo, np.zeros((48, 48), np.float32), scene, rng)
    assert np.abs(near.astype(int) - photo).mean() < 3  # the sensor's noise
    far = water.submerge(photo, np.full((48, 48), 500, np.float32), scene, rng)
    colour = (far.mean((0, 1)) / 255) ** water.GAMMA
    veil = -np.log(scene.transmission_per_m)
    assert colour / colour[2] == pytest.approx(veil[2] / veil, rel=0.1)
    assert far.std((0, 1)).max() < 4


def test_red_is_lost_first_and_distance_blurs() -> None:
    rng = np.random.default_rng(0)
    grey = np.full((32, 32, 3), 180, np.uint8)
    seen = water.submerge(
        grey, np.full((32, 32), 3, np.float32), water.Water("I", 3.0, 0.3), rng
    ).mean((0, 1))
    assert seen[0] < seen[1] < seen[2]
    edge = np.zeros((1, 400, 3), np.float32)
    edge[:, 200:] = 1
    blurred = water.blur_by_range(
        np.repeat(edge, 9, 0), np.repeat(np.linspace(0, 8, 9)[:, None], 400, 1)
    )
    widths = ((blurred[..., 0] > 0.02) & (blurred[..., 0] < 0.98)).sum(1)
    assert widths[0] == 0
    assert widths[8] > widths[4] > 0


def test_depth_below_the_surface_attenuates_each_channel() -> None:
    """At no range a picture keeps N_c^depth of each channel's light, times one exposure for all
    channels.
    """
    photo = (60 + photograph(3) * 0.4).astype(np.uint8)
    scene = water.Water("III", 3.0, 0.5)
    seen = water.submerge(photo, np.zeros((48, 48), np.float32), scene, np.random.default_rng(0))
    mean = [((image / 255) ** water.GAMMA).mean((0, 1)) for image in (photo, seen)]
    kept = mean[1] / mean[0]
    assert kept / kept[1] == pytest.approx((scene.transmission_per_m / 0.885) ** 3, rel=0.02)


def test_drawn_waters_are_those_that_people_dive_in() -> None:
    rng = np.random.default_rng(0)
    scenes = [water.draw_water(rng) for _ in range(200)]
    assert {scene.jerlov for scene in scenes} == set(water.TRANSMISSION_PER_M) - {"7C", "9C"}
    depths_m = {scene.jerlov: scene.depth_m for scene in scenes}
    assert all(depth_m <= water.reach_m(jerlov)[1] <= 18 for jerlov, depth_m in depths_m.items())
    # 4 in optical depth of red light in the clearest water
    assert max(scene.depth_m for scene in scenes) > 16
    red = [
        (scene.transmission_per_m[0] / scene.transmission_per_m[1]) ** scene.depth_m
        for scene in scenes
    ]
    assert 0.1 < np.median(red) < 0.35  # 0.36 to 0.6 in encoded values


def test_labels_name_what_is_seen() -> None:
    def likely(image: np.ndarray) -> str:
        return PROMPTS[int(label_from(describe(image)).global_prob.argmax())]

    green, blue, dark = (
        np.full((64, 64, 3), colour, np.uint8)
        for colour in ((80, 170, 90), (70, 90, 170), (9, 9, 9))
    )
    assert likely(green) == "green cast"
    assert likely(blue) == "blue haze"
    assert likely(dark) == "low light"
    label = label_from(describe(photograph(0)))
    assert label.shape == SHAPE
    assert label.source == "colour scores, not DA-CLIP's"
    assert float(label.global_prob.sum()) == pytest.approx(1)
    assert torch.allclose(label.z_d[:10].sigmoid(), label.global_prob, atol=1e-5)
    assert torch.allclose(label.z_d[10:], label.masks.mean((1, 2)), atol=1e-5)


def test_labels_in_three_npy_files_are_read(tmp_path: Path) -> None:
    for name, shape in (("features", 20), ("masks", (10, 4, 4)), ("probs", 10)):
        np.save(tmp_path / f"x_{name}.npy", np.full(shape, 0.1))
    label = read_label(tmp_path / "x_features.npy")
    assert label.shape == SHAPE
    assert float(label.confidence_scale) == pytest.approx(0.2)


HEADER = {
    "teacher": "DA-CLIP",
    "prompts": ["clear", "hazy"],
    "text_embeddings": [[1, 0, 0], [0, 1, 0]],
}
NAMES = ("train/a.png", "testset_ref/UIEB/b.jpg")


def scored(*scores: object) -> dict[str, object]:
    return {"picture": NAMES[0], "scores": scores}


def write_scores(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_scores_of_a_teacher_become_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = [[[0.1, 0.5]], [[0.3, -0.5]]]  # two prompts, one row of two cells
    records = [{"picture": NAMES[0], "scores": [0.2, 0.3]}, {"picture": NAMES[1], "scores": grid}]
    import_scores(write_scores(tmp_path / "s.jsonl", HEADER, *records), tmp_path / "labels", NAMES)
    assert "s.jsonl: 2 pictures" in capsys.readouterr().out
    whole, parts = (read_label((tmp_path / "labels" / name).with_suffix(".pt")) for name in NAMES)
    assert (whole.shape, whole.source) == ((2, 4, 2, 3), "DA-CLIP")
    assert whole.global_prob.tolist() == pytest.approx([1 / (1 + np.exp(1)), 1 / (1 + np.exp(-1))])
    assert whole.masks.flatten().tolist() == pytest.approx(
        [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-1.5))]
    )
    assert parts.masks.shape == (2, 1, 2)
    assert parts.global_prob[0].item() == pytest.approx(
        (1 / (1 + np.exp(2)) + 1 / (1 + np.exp(-10))) / 2
    )


def test_scores_of_a_folder_of_the_export_script_become_labels(tmp_path: Path) -> None:
    """The script's .pt files hold more; its masks are not used, the scores are."""
    scores = torch.tensor([[[0.1, 0.5]], [[0.3, -0.5]]])
    metadata = {"source_path": "a.png", "prompts": ["clear water", "green cast"], "alpha": 5.0}
    written = {"masks": torch.zeros(2, 1, 2), "scores": scores, "metadata": metadata}
    for name in NAMES:
        atomic_torch_save(written, (tmp_path / "export" / name).with_suffix(".pt"))
    import_scores(tmp_path / "export", tmp_path / "labels", NAMES)
    label = read_label((tmp_path / "labels" / NAMES[1]).with_suffix(".pt"))
    assert label.source == "scores of export"
    assert label.masks.flatten().tolist() == pytest.approx(
        (5 * scores).sigmoid().flatten().tolist()
    )
    file = (tmp_path / "export" / NAMES[0]).with_suffix(".pt")
    for broken in ({**written, "scores": 25 * scores}, {"scores": scores}):
        atomic_torch_save(broken, file)
        with assert_refused(f"--scores {file}: expected scores and metadata with prompts"):
            import_scores(tmp_path / "export", tmp_path / "labels", NAMES)
    file.unlink()
    with assert_refused(f"export: no scores of 1 of 2 pictures, the first is {NAMES[0]}"):
        import_scores(tmp_path / "export", tmp_path / "labels", NAMES)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no scores of 2 of 2 pictures, the first is testset_ref/UIEB/b.jpg"),
        ([[1]], "1: expected an object with prompts and teacher"),
        ([{**HEADER, "teacher": ""}], "1: teacher: expected a name"),
        ([{**HEADER, "prompts": "hazy"}], "1: prompts: expected a list"),
        ([{**HEADER, "text_embeddings": "x"}], "1: "),
        ([{**HEADER, "text_embeddings": [[1.0]]}, scored(0, 0)], "2: 1 text_embeddings for 2"),
        ([HEADER, {"picture": NAMES[0]}], "2: expected an object with picture and scores"),
        ([HEADER, scored(0.1)], "2: scores: expected 2 numbers, one for each prompt, or 2 grids"),
        ([HEADER, scored("0.1", "0.2")], "2: scores: expected 2 numbers"),
        ([HEADER, scored(0.1, 25)], "2: scores: a cosine similarity is between -1 and 1"),
        ([HEADER, scored(0.1, float("nan"))], "2: scores: a cosine similarity is between"),
        (
            [HEADER, {**scored(0, 0), "picture": "c.png"}],
            "2: c.png is not a picture of the data set; expected one",
        ),
        ([HEADER, *[scored(0, 0)] * 2], "3: train/a.png stands in line 2 already"),
        ([HEADER, scored(0, 0)], "no scores of 1 of 2 pictures, the first is testset_ref"),
    ],
)
def test_a_wrong_line_of_scores_is_named_and_no_label_is_written(
    tmp_path: Path, records: list[object], reason: str
) -> None:
    with assert_refused(reason, "s.jsonl"):
        import_scores(write_scores(tmp_path / "s.jsonl", *records), tmp_path / "labels", NAMES)
    assert not (tmp_path / "labels").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a pseudo-label"),
        ({"masks": torch.rand(2, 4, 4)}, "no z_d"),
        ({"masks": torch.rand(4, 4)}, "masks has the shape (4, 4), expected 3 dimensions"),
        ({"masks": torch.full((2, 4, 4), 2.0)}, "masks outside 0 to 1"),
        ({"masks": torch.full((2, 4, 4), torch.nan)}, "masks is not finite"),
        ([1], "no dictionary"),
    ],
)
def test_a_broken_label_is_one_line(tmp_path: Path, content: object, reason: str) -> None:
    file = tmp_path / "x.pt"
    if isinstance(content, dict) and "no z_d" not in reason:
        content = {
            **content,
            "z_d": torch.zeros(4),
            "global_prob": torch.ones(2),
            "confidence_scale": torch.ones(()),
        }
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with assert_refused(str(file), reason):
        read_label(file)


def test_pictures_without_a_partner_are_left_out(pairs: Path) -> None:
    write_png(pairs / "train" / "input" / "alone.png", photograph(9))
    for folder in ("input", "target"):
        for name in ("notes.txt", "x.gif", "F.JPG"):
            (pairs / "train" / folder / name).touch()
    (pairs / "labels" / "F.pt").touch()
    entries = train_entries(pairs / "train", pairs / "labels")
    names = [str(entry.picture.relative_to(pairs / "train/input")) for entry in entries]
    assert names == ["F.JPG", "a.png", "c.png", "d.png", "deep/b.png", "e.png"]


def test_the_pictures_of_a_scene_are_in_one_share(tmp_path: Path) -> None:
    names = ("reef/1.png", "reef/2.png", "reef/3.png", "a.png", "b.png", "c.png", "wreck/1.png")
    write_pairs(tmp_path / "train", tmp_path / "labels", names)
    entries = train_entries(tmp_path / "train", tmp_path / "labels")
    source = tmp_path / "train" / "input"
    shares = shares_by_scene(entries, source, 2)
    placed = [[str(entry.picture.relative_to(source)) for entry in share] for share in shares]
    assert sorted(itertools.chain.from_iterable(placed)) == sorted(names)
    assert [len(share) for share in placed] == [4, 3]
    assert set(names[:3]) <= set(placed[0])
    assert {entry.set_name for entry in shares[1]} == {"held-out"}
    with assert_refused("5 scenes cannot make 6 folds"):
        shares_by_scene(entries, source, 6)


def test_missing_data_is_one_line_with_the_remedy(pairs: Path) -> None:
    with assert_refused("no picture has the same path", "python make_data.py"):
        train_entries(pairs / "nowhere", pairs / "labels")
    (pairs / "labels" / "c.pt").unlink()
    with assert_refused(
        "1 of 5 pictures have no pseudo-label", "c.png; ", "export_pseudo_labels.py"
    ):
        train_entries(pairs / "train", pairs / "labels")
    assert benchmark_entries(pairs / "nowhere", pairs / "labels", True) == []


def test_a_benchmark_set_without_targets_may_be_a_bare_folder(pairs: Path) -> None:
    write_png(pairs / "bare" / "Photos" / "b.png", photograph(1))
    atomic_torch_save(describe(photograph(1)), pairs / "labels" / "Photos" / "b.pt")
    (found,) = benchmark_entries(pairs / "bare", pairs / "labels", False)
    assert (found.set_name, found.target) == ("Photos", None)


def test_masks_stay_on_their_pixels_when_a_sample_is_turned(tmp_path: Path) -> None:
    bright = np.zeros((64, 64, 3), np.uint8)
    bright[8:24, 40:56] = 255
    write_pairs(tmp_path / "train", tmp_path / "labels", ("a.png",))
    for folder in ("input", "target"):
        write_png(tmp_path / "train" / folder / "a.png", bright)
    label = describe(bright)
    label["masks"] = torch.from_numpy(bright[..., 0] / 255).float().expand(10, -1, -1).contiguous()
    atomic_torch_save(label, tmp_path / "labels" / "a.pt")
    entries = train_entries(tmp_path / "train", tmp_path / "labels")
    dataset, other = (
        RestorationDataset(entries, 32, SHAPE, augment=True, seed=seed) for seed in (1, 2)
    )
    placements = set()
    for epoch in range(12):
        sample = dataset[(epoch, 0)]
        assert torch.allclose(sample["masks"][4], sample["picture"][1], atol=0.01), epoch
        assert torch.equal(sample["picture"], sample["target"])  # here the same picture
        placements.add(int(sample["masks"][0].argmax()))
    assert len(placements) > 6
    assert torch.equal(dataset[(11, 0)]["picture"], sample["picture"])
    assert not torch.equal(other[(11, 0)]["picture"], sample["picture"])


def test_every_picture_is_used_once_an_epoch_by_all_ranks_together(pairs: Path) -> None:
    dataset = RestorationDataset(
        train_entries(pairs / "train", pairs / "labels"), SIZE_PX, SHAPE, augment=True
    )
    seen, lengths = [], set()
    for rank in range(2):
        loader = create_paired_train_loader(dataset, 2, sampler=EpochBatches(5, 2, rank, 2, seed=0))
        lengths.add(len(loader))
        seen += [index for batch in loader for index in batch["index"].tolist()]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert lengths == {2}
    alone = [
        index
        for batch in create_paired_train_loader(dataset, 2)
        for index in batch["index"].tolist()
    ]
    in_order = [
        index for batch in create_evaluation_loader(dataset, 2) for index in batch["index"].tolist()
    ]
    assert sorted(alone) == in_order == [0, 1, 2, 3, 4]


def test_pytorchs_distributed_sampler_chooses_the_pictures_of_each_epoch(pairs: Path) -> None:
    dataset = RestorationDataset(
        train_entries(pairs / "train", pairs / "labels"), SIZE_PX, SHAPE, augment=True
    )
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, 1)  # type: ignore[arg-type]
    loader = create_paired_train_loader(dataset, 2, sampler=sampler)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        chosen, batches = list(sampler), list(loader)
        assert [batch["index"].tolist() for batch in batches] == [chosen[:2], chosen[2:]]
        assert torch.equal(batches[1]["picture"][0], dataset[(epoch, chosen[2])]["picture"])
    loader.set_epoch(0, start_batch=1)  # as a resumed training does
    (rest,) = [batch["index"].tolist() for batch in loader]
    assert (sampler.epoch, rest) == (0, list(sampler)[2:])
    assert rest != chosen[2:]


def test_a_picture_or_label_that_does_not_fit_is_named(pairs: Path) -> None:
    entries = train_entries(pairs / "train", pairs / "labels")
    with assert_refused("a.pt: ", "(10, 20, 10, 0), but the network has (3, 6, 3, 0)"):
        RestorationDataset(entries, SIZE_PX, (3, 6, 3, 0))[(0, 0)]
    entries[0].picture.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with assert_refused("a.png: ", "repair or remove it"):
        RestorationDataset(entries, SIZE_PX, SHAPE)[(0, 0)]


def test_the_default_photographs_are_those_of_the_packages() -> None:
    if not all(map(find_spec, ("skimage", "sklearn"))):  # their import takes seconds
        pytest.skip("needs a package (pip install -r recipes/underwater_ir/requirements.txt)")
    assert len(find_photographs(None)) == 7
