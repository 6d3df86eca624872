"""How a run trains on its photographs: what the options leave open is decided here once, from the
labels.
"""

from dataclasses import dataclass
from typing import Any

from yolo_seg_ddp.data.augment import Augmentation, AugmentOptions
from yolo_seg_ddp.data.label_shapes import LabelStatistics
from yolo_seg_ddp.data.polygons import MIN_ELONGATION
from yolo_seg_ddp.data.windows import WindowConfig
from yolo_seg_ddp.utils.errors import UsageError

# For photographs from above: with --fliplr 0.5 every direction is equally likely.
# docs/research/wires.md has the measurement.
FROM_ABOVE = {"degrees": 90.0, "flipud": 0.5, "draw_wires": 0.5}
# poles of photographs from the ground have 1.0, wires of a drone that looks down 0.6 to 0.75
MAX_AGREEMENT = 0.9


@dataclass(frozen=True)
class AugmentationPolicy:
    """What data set, loss, task and model file need to know of `--windows` and of what follows from
    it.

    windows: how many of each photograph make up an epoch, and their scale; None: whole photographs.
    within_reach: objects are assigned only to anchors that can predict their whole box.
    augment: without unset strengths, with the thin classes and those as which wires are drawn.
    lines: for the console, what was decided and why.
    """

    windows: WindowConfig | None
    within_reach: bool
    augment: Augmentation
    lines: tuple[str, ...]


def resolve_augmentation(
    windows: WindowConfig | None,
    reach: str,
    options: AugmentOptions,
    labels: LabelStatistics,
    names: tuple[str, ...],
) -> AugmentationPolicy:
    """Decide how a run trains, alike on all ranks. `reach` is auto, on or off.

    Raises UsageError for `--draw-wires` where no class is thin, and for `--paste` where all are.
    """
    lines = []
    if windows and reach == "auto":
        lines.append(
            "Objects are assigned to anchors that can predict their whole box, because of "
            "--windows (--reach off: to all)"
        )
    from_above, reasons = turns_and_wires(windows, options, labels)
    given: dict[str, Any] = {
        name: 0.0 if value is None else value for name, value in vars(options).items()
    }
    augment = Augmentation(
        **given | from_above, wire_classes=labels.thin, drawn_classes=labels.straight
    )
    if augment.paste and labels.are_all_thin:
        raise UsageError(
            "--paste: the training labels hold no object to paste; thin classes, such as wires, "
            "are not pasted"
        )
    if augment.draw_wires and not labels.thin:
        raise UsageError("--draw-wires: no class of the training labels is as thin as wires are")
    lines += reasons
    if augment.draw_wires:
        drawn = ", ".join(names[class_id] for class_id in labels.straight or labels.thin)
        lines.append(f"Wires are drawn as {drawn}; --draw-wires 0: none")
    if windows and labels.curved:
        bent = ", ".join(
            f"{names[class_id]} {labels.bends[class_id]:.1f} times" for class_id in labels.curved
        )
        lines.append(
            f"Curved labels: {bent} as curved as wires may be. They count as no wires: none are "
            "drawn (--draw-wires 0.5 draws some), and they have no direction (--degrees 90 turns "
            "photographs)"
        )
    if windows and labels.thin:
        thin = ", ".join(names[class_id] for class_id in labels.thin)
        lines.append(
            f"Thin classes: {thin}, at least {MIN_ELONGATION:g} times as long as wide. They are "
            "found as lines "
            "(evaluate_model.py --thin-classes none: as masks)"
        )
    return AugmentationPolicy(
        windows, reach == "on" or (reach == "auto" and windows is not None), augment, tuple(lines)
    )


def turns_and_wires(
    windows: WindowConfig | None, options: AugmentOptions, labels: LabelStatistics
) -> tuple[dict[str, float], list[str]]:
    """Return the strengths of FROM_ABOVE that a training on windows takes over where they are
    unset, and the reason.

    Wires are drawn where a thin class is straight.
    """
    unset = [
        name
        for name in FROM_ABOVE
        if getattr(options, name) is None and (labels.straight or name != "draw_wires")
    ]
    # Other trainings get no advice: cars on a road lie in many directions, too, but have an up.
    if not (windows and unset) or labels.agreement is None:
        return {}, []
    agreement = f"{labels.agreement:.2f}, limit {MAX_AGREEMENT}"
    if labels.agreement < MAX_AGREEMENT:
        chosen = {name: FROM_ABOVE[name] for name in unset}
        typed = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in chosen.items())
        return chosen, [
            f"Labelled objects lie in many directions (agreement {agreement}): training with "
            f"{typed}"
        ]
    line = (
        f"Labelled objects agree in their direction ({agreement}): photographs are not turned "
        "(--degrees 90 --flipud 0.5 turn them)"
    )
    return {}, [line]
