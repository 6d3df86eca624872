"""The network, its losses, and the metrics."""

import math
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.nn import functional
from underwater_ir.metrics import psnr_db, ssim, uciqe, uiqm
from underwater_ir.student import losses
from underwater_ir.student.losses import WEIGHTS, StudentLoss, load_vgg, read_weights
from underwater_ir.student.network import (
    Curves,
    MultiScale,
    Outputs,
    Student,
    channel_attention,
    haar,
    inverse_haar,
    read_student,
)

from recipes.underwater_ir.tests.small import NO_VGG, SIZE_PX, batch, photograph, student
from tests.support.recipes import assert_refused

# --- The network and its losses -------------------------------------------------------------------


def test_the_wavelet_is_orthonormal_and_invertible() -> None:
    features = torch.rand(2, 3, 8, 12)
    bands = haar(features)
    assert all(band.shape == (2, 3, 4, 6) for band in bands)
    assert torch.allclose(inverse_haar(*bands), features, atol=1e-6)
    assert float(sum(band.square().sum() for band in bands)) == pytest.approx(
        float(features.square().sum()), rel=1e-5
    )
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(1, 1, 4, 8)  # along x: LH alone
    assert [float(band.abs().max()) for band in haar(stripes)] == [0, 2, 0, 0]


def test_three_kernels_in_one_give_the_sum_of_three_convolutions() -> None:
    layer, features = MultiScale(3), torch.rand(2, 3, 9, 10)
    sizes = zip((3, 5, 7), layer.kernels, strict=True)
    expected = torch.stack(
        [kernel(functional.pad(features, (size // 2,) * 4)) for size, kernel in sizes]
    ).sum(0)
    assert torch.allclose(layer(features), expected, atol=1e-6)


def test_attention_mixes_channels_as_written_out() -> None:
    query, key, first, second = torch.randn(4, 2, 8, 3, 5).unbind(0)
    temperature = torch.tensor([1.0, 3.0])[:, None, None]
    mixed = channel_attention(query, key, temperature, first, second)
    for head in range(2):
        channels = slice(4 * head, 4 * head + 4)
        q, k = (
            functional.normalize(tensor[1, channels].flatten(1), dim=1) for tensor in (query, key)
        )
        shares = (temperature[head] * q @ k.T).softmax(1)
        for value, result in zip((first, second), mixed, strict=True):
            assert torch.allclose(
                result[1, channels].flatten(1), shares @ value[1, channels].flatten(1), atol=1e-5
            )


@pytest.mark.parametrize("kind", [Student, Curves])
def test_an_untrained_student_returns_its_input(kind: type[Student | Curves]) -> None:
    network, inputs = kind(4, 10, 20, 10).eval(), batch(2)
    outputs = network(inputs)
    assert torch.allclose(outputs.picture, inputs["picture"])
    gate_shape = (2, 1, SIZE_PX // 2, SIZE_PX // 2)
    assert outputs.gate is None if kind is Curves else outputs.gate.shape == gate_shape
    assert outputs.degradation.shape == (2, 10)


def test_curves_are_one_function_of_colour_for_the_whole_picture() -> None:
    """Equal pixels of a flat picture with one spot stay equal; the result is the formula's."""
    network = student(kind=Curves).eval()
    inputs = batch(1)
    inputs["picture"] = torch.full((1, 3, 40, 24), 0.5)
    inputs["picture"][..., :4, :4] = 0.25
    changed = network(inputs).picture[0]
    assert torch.equal(changed[:, :4, :4], changed[:, :1, :1].expand(3, 4, 4))
    assert torch.equal(changed[:, 4:], changed[:, -1:, -1:].expand(3, 36, 24))
    torch.nn.init.zeros_(network.head.weight)
    network.head.bias.data = torch.tensor([0.1, 0, 0, 0, 0, 0, 0.5] + [0.0] * 14)
    red = network(inputs).picture[0, 0]
    # red + 0.1 + blue squared / 2
    assert red[[0, 5], 0].tolist() == pytest.approx([0.25 + 0.1 + 0.03125, 0.5 + 0.1 + 0.125])


def test_recomputing_gives_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        network = student()
        network.recompute = recompute
        loss, _ = StudentLoss(WEIGHTS)(network(batch(2)), batch(2))
        loss.backward()
        gradients.append([weight.grad for weight in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", [Student, Curves])
def test_label_and_masks_change_the_picture(kind: type[Student | Curves]) -> None:
    network, inputs = student(kind=kind).eval(), batch(1)
    before = network(inputs).picture
    for name in ("z_d", "masks"):
        changed = network({**inputs, name: torch.zeros_like(inputs[name])}).picture
        assert float((changed - before).detach().abs().max()) > 1e-5, name


@pytest.mark.parametrize("kind", [Student, Curves])
def test_the_network_is_found_from_its_weights(
    kind: type[Student | Curves], tmp_path: Path
) -> None:
    network = student(kind=kind, text_dim=6)
    torch.save(network.state_dict(), tmp_path / "x.pt")
    found = read_student(tmp_path / "x.pt")
    assert type(found) is kind
    assert found.label_shape == network.label_shape == (10, 20, 10, 6)
    assert not found.training
    name = "stem.weight" if kind is Student else "look.0.weight"
    torch.save({name: torch.zeros(4, 3, 3, 3)}, tmp_path / "x.pt")
    with assert_refused("x.pt: not weights of this network"):
        read_student(tmp_path / "x.pt")


def outputs_of(picture: torch.Tensor) -> Outputs:
    return Outputs(
        picture, torch.full((len(picture), 1, 8, 8), 0.25), torch.zeros(len(picture), 10), None
    )


def test_each_loss_in_numbers() -> None:
    """A picture that is 0.5 too bright everywhere, with masks of 1: the values follow from the
    formulas.
    """
    target = torch.full((2, 3, SIZE_PX, SIZE_PX), 0.25)
    targets = {**batch(2), "target": target, "masks": torch.ones(2, 10, SIZE_PX, SIZE_PX)}
    targets["global_prob"] = torch.eye(10)[:2]
    targets["confidence_scale"] = torch.tensor([1.0, 0.5])
    values = {
        name: term(outputs_of(target + 0.5), targets).tolist()
        for name, term in losses.TERMS.items()
    }
    assert values["rec"] == pytest.approx([0.5, 0.5], rel=1e-4)
    luminance = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)  # SSIM of two flat pictures
    assert values["ssim"] == pytest.approx([1 - luminance] * 2, rel=1e-3)
    assert values["hf"] == pytest.approx([0, 0], abs=1e-6)
    # LL is twice the picture; its 8 x 8 orthonormal spectrum has 8 times the value at frequency 0
    # alone.
    assert values["lf"] == pytest.approx([2 * 0.5 * 8 / 64] * 2, rel=1e-4)
    assert values["region"] == pytest.approx([0.5, 0.5])
    assert values["tv"] == [0, 0]
    assert values["kd"] == pytest.approx([np.log(10), np.log(10) / 2])
    assert values["feat"] == pytest.approx([0.75, 0.75])


def test_variation_counts_both_directions() -> None:
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    picture = (0.03 * row + 0.05 * column).expand(1, 3, 8, 8)
    assert losses.variation(outputs_of(picture), {}).tolist() == pytest.approx([0.08])


def test_high_bands_follow_the_first_mask_and_the_low_band_the_last() -> None:
    """The picture is a random one with stripes in its lower left quarter, and 0.5 brighter
    everywhere.
    """
    target = 0.3 * batch(1)["target"]
    half = SIZE_PX // 2
    stripes = torch.zeros(SIZE_PX, SIZE_PX)
    stripes[half:, :half] = torch.tensor([0.25, -0.25]).repeat(half // 2)
    masks = torch.zeros(1, 10, SIZE_PX, SIZE_PX)
    masks[:, 0, half:, :half] = 1  # where the stripes are: LH is 2 * 0.25 there
    masks[:, -1, :half, :half] = 1
    hf = losses.high_frequency(
        outputs_of(target + stripes + 0.5), {"target": target, "masks": masks}
    )
    assert hf.tolist() == pytest.approx([0.5], rel=1e-4)
    # The masked band LL is 2 * 0.5 times the mask.
    bright = {"target": torch.zeros_like(target), "masks": masks}
    mask = masks[0, -1, ::2, ::2]
    expected = torch.fft.fft2(mask, norm="ortho").abs().sum() / mask.sum()
    assert losses.low_frequency(
        outputs_of(bright["target"] + 0.5), bright
    ).tolist() == pytest.approx([float(expected)])
    lf = losses.low_frequency(
        outputs_of(target + stripes.abs()), {"target": target, "masks": masks}
    )
    assert lf.tolist() == [0]  # brighter outside the mask alone


def test_every_loss_has_its_default_weight() -> None:
    network, samples = student(text_dim=6), batch(2, text_dim=6)
    with torch.no_grad():
        outputs = network(samples)
    weights = {
        "rec": 1,
        "ssim": 0.2,
        "hf": 0.5,
        "lf": 0.5,
        "region": 0.3,
        "tv": 1e-4,
        "kd": 0.1,
        "feat": 0.05,
    }
    weights["ctr"] = 0.05
    assert weights | {"perc": 0.05} == read_weights(None)
    _, values = StudentLoss(read_weights(None))(outputs, samples)
    terms = {name: term(outputs, samples).mean() for name, term in losses.TERMS.items()}
    terms["ctr"] = losses.contrast(outputs.text, samples).mean()
    assert all(float(term) > 0.01 for term in terms.values())
    expected = sum(weight * float(terms[name]) for name, weight in weights.items())
    assert float(values["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_mask_selects_its_region() -> None:
    masks = torch.zeros(1, 1, 4, 4)
    masks[..., :2] = 1
    values = torch.arange(64.0).view(1, 1, 8, 8) % 8  # the column's number
    assert float(losses.masked_mean(values, masks)) == pytest.approx(1.5)
    assert float(losses.masked_mean(values, torch.zeros(1, 1, 8, 8))) == 0


def test_the_contrast_prefers_the_likely_embedding() -> None:
    embeddings = torch.eye(10)[None]
    targets = {"text_embeddings": embeddings, "global_prob": torch.eye(10)[3:4]}
    near, far = (float(losses.contrast(embeddings[:, kind], targets)) for kind in (3, 4))
    assert near < 1e-4
    assert far == pytest.approx(1 / 0.07, rel=1e-3)


@pytest.mark.parametrize("kind", [Student, Curves])
@pytest.mark.parametrize("weights", [WEIGHTS, NO_VGG | {"kd": 0, "feat": 0, "ctr": 0}])
def test_every_weight_gets_a_gradient_also_without_its_loss(
    weights: dict[str, float], kind: type[Student | Curves]
) -> None:
    network, samples = student(kind=kind, text_dim=6), batch(2, text_dim=6)
    loss, values = StudentLoss(WEIGHTS | weights)(network(samples), samples)
    loss.backward()
    assert all(weight.grad is not None for weight in network.parameters())
    assert all(bool(weight.grad.isfinite().all()) for weight in network.parameters())
    assert ("ctr" in values) == bool((WEIGHTS | weights)["ctr"])
    assert float(values["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON file"),
        ("[1]", "expected an object"),
        ('{"ssimm": 1}', "unknown loss ssimm (did you mean ssim?)"),
        ('{"rec": -1}', "rec: -1 is not a number of at least 0"),
        ('{"rec": true}', "rec: True is not a number"),
        ('{"rec": NaN}', "rec: nan is not a number"),
    ],
)
def test_a_wrong_loss_file_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "losses.json"
    file.write_text(text)
    with assert_refused(str(file), reason):
        read_weights(str(file))
    file.write_text('{"perc": 0, "tv": 1}')
    assert read_weights(str(file)) == WEIGHTS | {"perc": 0.0, "tv": 1.0}


def test_vgg_compares_the_two_layers_of_the_formula(tmp_path: Path) -> None:
    """Random weights in the layout of torchvision's file stand for the trained ones."""
    from torchvision.models import vgg19

    names = {
        f"features.{number}.{kind}"
        for number in (0, 2, 5, 7, 10, 12, 14, 16)
        for kind in ("weight", "bias")
    }
    with torch.device("meta"):
        shapes = {
            name: value.shape
            for name, value in vgg19(weights=None).state_dict().items()
            if name in names
        }
    torch.manual_seed(0)
    weights = {name: 0.05 * torch.randn(shape) for name, shape in shapes.items()}
    torch.save(weights, tmp_path / "vgg.pt")
    features = load_vgg(str(tmp_path / "vgg.pt"), tmp_path)
    samples = batch(2)
    found = losses.perceptual(features, samples["picture"], samples["target"])
    mean, std = (
        torch.tensor(part).view(3, 1, 1) for part in (losses.IMAGENET_MEAN, losses.IMAGENET_STD)
    )
    mine, theirs = (features[:9]((samples[name] - mean) / std) for name in ("picture", "target"))
    expected = (mine - theirs).abs().mean((1, 2, 3))
    expected += (features[9:](mine) - features[9:](theirs)).abs().mean((1, 2, 3))
    assert torch.allclose(found, expected, rtol=1e-4)
    assert len(features) == 18
    assert not any(weight.requires_grad for weight in features.parameters())
    (tmp_path / "vgg.pt").write_bytes(b"no weights")
    with assert_refused("VGG19's weights"):
        load_vgg(str(tmp_path / "vgg.pt"), tmp_path)


# --- The metrics: PSNR and SSIM against scikit-image, UIQM and UCIQE against others' programs -----


NEEDS = "needs the packages of the recipe (pip install -r recipes/underwater_ir/requirements.txt)"


def tensor_of(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.astype(np.float64) / 255).permute(2, 0, 1)[None]


def noisy(image: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 25, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def test_psnr_and_ssim_are_those_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason=NEEDS)
    clear = photograph(1, 40, 53)
    pairs = [(clear, noisy(clear, seed)) for seed in range(2)]
    first, second = (torch.cat([tensor_of(pair[side]) for pair in pairs]) for side in (0, 1))
    expected = [metrics.peak_signal_noise_ratio(*pair) for pair in pairs]
    assert psnr_db(first, second).tolist() == pytest.approx(expected, abs=1e-6)
    # skimage averages over channels and leaves out the same border of 5 pixels.
    options = {
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "channel_axis": 2,
    }
    expected = [metrics.structural_similarity(*pair, data_range=255, **options) for pair in pairs]
    assert ssim(first, second).tolist() == pytest.approx(expected, abs=1e-6)


def test_half_the_range_of_error_is_six_db_and_a_perfect_picture_has_100_db_and_similarity_1() -> (
    None
):
    assert float(psnr_db(torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.5))) == pytest.approx(
        20 * math.log10(2)
    )
    picture = tensor_of(photograph(2))
    assert psnr_db(picture, picture).tolist() == [100.0]
    assert ssim(picture, picture).tolist() == pytest.approx([1.0])


# UIQM by Evaluation/uqim_utils.py of xahidbuffon/FUnIE-GAN (8f934c8; its Python 2 divisions as //),
# the same with 0.114 for blue, and UCIQE by UCIQE.py of JOU-UIP/UCIQE (02a3cf3).
BY_THE_PROGRAMS = {
    "drawn": (2.459066, 2.425006, 0.691129),
    "large": (1.971529, 1.947357, 0.682893),
    "coffee": (2.520403, 2.469483, 0.663189),
}


@pytest.mark.parametrize("name", BY_THE_PROGRAMS)
def test_uiqm_and_uciqe_are_those_of_the_programs_that_publications_use(name: str) -> None:
    if name == "coffee":
        image = pytest.importorskip("skimage.data", reason=NEEDS).coffee()
    else:
        image = photograph(4, 64, 80) if name == "drawn" else photograph(5, 100, 130)
    # uqim_utils leaves out one more of the smallest colour differences.
    assert (uiqm(image), uiqm(image, as_in_paper=True), uciqe(image)) == pytest.approx(
        BY_THE_PROGRAMS[name], abs=3e-5
    )


def test_the_shares_that_uiqm_and_uciqe_leave_out_are_rounded_as_in_the_programs() -> None:
    """Of 121 pixels the 13 smallest and the 12 largest differences; percentiles of 100 pixels are
    values of pixels.
    """
    # its only block of 10 x 10 has neither edges nor contrast
    reddish = np.full((11, 11, 3), 50, np.uint8)
    reddish[10, :, 0] = reddish[8:10, 10, 0] = 200  # 13 pixels
    means = np.array([150, 75]) / (121 - 13 - 12)
    variances = (13 * (np.array([150, 75]) - means) ** 2 + 108 * means**2) / 121
    expected = 0.0282 * (-0.0268 * np.hypot(*means) + 0.1586 * np.sqrt(variances.sum()))
    assert uiqm(reddish) == pytest.approx(expected, rel=1e-9)
    grey = np.full((10, 10, 3), 119, np.uint8)
    grey[0, :2] = [[0], [255]]
    lightness = cv2.cvtColor(grey, cv2.COLOR_RGB2LAB)[..., 0] / 255.0
    chroma = np.hypot(128, 128) / 255
    contrast = np.sort(lightness, axis=None)[98] - 0
    expected = 0.2745 * contrast + 0.2576 * (chroma / np.hypot(chroma, lightness)).mean()
    assert uciqe(grey) == pytest.approx(expected, abs=1e-6)


def test_a_black_picture_has_no_quality() -> None:
    black = np.zeros((20, 20, 3), np.uint8)
    assert uiqm(black) == 0
    assert 0 <= uciqe(black) < 0.5
    assert uciqe(black, as_in_paper=True) == 0


def test_uciqe_of_the_paper_is_its_definition_with_the_lab_of_scikit_image() -> None:
    color = pytest.importorskip("skimage.color", reason=NEEDS)
    image = photograph(4)
    lab = color.rgb2lab(image)
    lightness, chroma = lab[..., 0] / 100, np.hypot(lab[..., 1], lab[..., 2]) / 255
    low, high = np.percentile(lightness, (1, 99))
    saturation = np.mean(chroma / np.sqrt(chroma**2 + lightness**2))
    expected = 0.4680 * np.std(chroma) + 0.2745 * (high - low) + 0.2576 * saturation
    assert uciqe(image, as_in_paper=True) == pytest.approx(expected, abs=1e-4)
    assert uciqe(np.full((20, 20, 3), 255, np.uint8), as_in_paper=True) == pytest.approx(
        0, abs=1e-3
    )
