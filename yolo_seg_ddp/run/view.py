"""Formats a run's state as lines of text for a terminal."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from yolo_seg_ddp.run.records import Record, RunState, best_epoch, number_of, others_ms
from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.text import format_bytes, format_duration, format_table

MIN_COLUMNS = 40
MAX_COLUMNS = 120
MAX_EPOCHS = 6  # rows of the epoch table
MAX_RANKS = 12

_BAR_WIDTH = 20
_NOT_LOSSES = (
    "epoch",
    "batch",
    "global_step",
    "images_per_s",
    "step_ms",
    "data_wait_share",
    "num_batches",
    "time_s",
)
# Title -> (key of the record, how its number is written)
_Columns = dict[str, tuple[str, Callable[[float], str]]]
_EPOCH_COLUMNS: _Columns = {
    "train loss": ("train_loss", "{:.4f}".format),
    "val loss": ("val_loss", "{:.4f}".format),
    "box mAP": ("box_map50_95", "{:.4f}".format),
    "mask mAP": ("mask_map50_95", "{:.4f}".format),
    "images/s": ("images_per_s", "{:.1f}".format),
    "data wait": ("data_wait_share", "{:.0%}".format),
    "time": ("total_epoch_time_s", format_duration),
}
_RANK_COLUMNS: _Columns = {
    "own ms": ("own_ms", "{:.0f}".format),
    "data wait": ("data_wait_share", "{:.0%}".format),
    "cores": ("cpu_cores", "{:.1f}".format),
    "memory": ("rss_bytes", format_bytes),
    "GPU": ("gpu_util", "{:.0%}".format),
    "GPU mem": ("gpu_memory_bytes", format_bytes),
    "W": ("gpu_power_w", "{:.0f}".format),
    "°C": ("gpu_temperature_c", "{:.0f}".format),
    "MHz": ("gpu_clock_mhz", "{:.0f}".format),
}
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def view_lines(
    state: RunState, columns: int, now_s: float, *, is_unicode: bool = True
) -> list[str]:
    """Return the whole view, no line longer than `columns`."""
    columns = min(max(columns, MIN_COLUMNS), MAX_COLUMNS)
    blocks = _BLOCKS if is_unicode else _ASCII
    sections = [
        _heading(state, now_s),
        _progress(state, blocks),
        _curves(state, columns, blocks),
        _epoch_table(state),
        _rank_table(state),
    ]
    lines = [line for section in sections if section for line in [*section, ""]][:-1]
    if not is_unicode:
        lines = [line.replace("°", "").encode("ascii", "replace").decode() for line in lines]
    return [line[:columns].rstrip() for line in lines]


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Return values as a line of at most `width` blocks; each shows
    the mean of consecutive values.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(number * len(values) / width) for number in range(width + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return blocks[len(blocks) // 2] * width
    return "".join(
        blocks[min(int((mean - low) / (high - low) * len(blocks)), len(blocks) - 1)]
        for mean in means
    )


def _heading(state: RunState, now_s: float) -> list[str]:
    name = printable(str(state.folder), 60)
    config = state.config
    trouble = state.trouble(now_s)
    reason = printable(str(state.status.get("reason") or ""), 200)
    if trouble:
        status = f"LOOKS DEAD: {trouble}"
    elif state.state == "running":
        status = f"running, last written {format_duration(state.silent_s(now_s))} ago"
    else:
        status = (state.state or "no status.json") + (f": {reason}" if reason else "")
    ranks = len(_last_batch(state).get("ranks", {}).get("own_ms", [])) or None
    settings = [
        printable(str(config["model"])) if "model" in config else None,
        f"{config['img_size']} px" if "img_size" in config else None,
        f"batch {config.get('batch_size')} x {ranks} {'rank' if ranks == 1 else 'ranks'}"
        if ranks
        else None,
        f"seed {config['seed']}" if "seed" in config else None,
    ]
    return [name, status, ", ".join(setting for setting in settings if setting)]


def _progress(state: RunState, blocks: str) -> list[str]:
    last = _last_batch(state)
    done, share, batch = _position(state)
    epochs = state.config.get("epochs")
    if not (last or state.epochs) or not isinstance(epochs, int) or epochs < 1:
        return ["no batch yet: reading the data set or preparing the first step"]
    is_over = state.state == "finished"
    share_done = 1.0 if is_over else min((done + share) / epochs, 1.0)
    full, empty = (blocks[-1], "░") if blocks == _BLOCKS else ("#", ".")
    bar = (full * round(share_done * _BAR_WIDTH)).ljust(_BAR_WIDTH, empty)
    trained_s = sum(
        value
        for value in (_number(record, "total_epoch_time_s") for record in state.epochs)
        if value > 0
    )
    step = (last or state.epochs[-1]).get("global_step", "?")
    position = (
        f"Epoch {min(done + 1, epochs)}/{epochs}, batch {batch}"
        if batch
        else f"Epoch {done}/{epochs}"
    )
    left = (
        f"{format_duration(trained_s)} in all"
        if is_over
        else f"{format_duration(_number(last, 'left_s'))} left"
    )
    speed = [
        f"{_number(last, 'images_per_s'):.1f} images/s",
        f"{_number(last, 'step_ms'):.0f} ms/batch",
        f"data wait {_number(last, 'data_wait_share'):.0%}",
        *device_words(last.get("ranks", {})),
    ]
    lines = [f"{position}, step {step}  {bar} {share_done:.0%}, {left}"]
    return [*lines, ", ".join(word for word in speed if "nan" not in word)] if last else lines


def _curves(state: RunState, columns: int, blocks: str) -> list[str]:
    """Return a sparkline for each loss over the batches and each metric over the epochs."""
    last = _last_batch(state)
    losses = [
        name for name, value in last.items() if name not in _NOT_LOSSES and isinstance(value, float)
    ]
    # The total comes first.
    losses.sort(key=lambda name: name != "loss")
    series = {name: [_number(record, name) for record in state.batches] for name in losses}
    of_epochs = ("val_loss", "box_map50_95", "mask_map50_95")
    series |= {
        name: values
        for name in of_epochs
        if (values := [_number(record, name) for record in state.epochs])
    }
    lines = []
    for name, values in series.items():
        known = [value for value in values if math.isfinite(value)]
        if known:
            line = sparkline(known, columns - 26, blocks)
            lines.append(f"{printable(name, 14):<14} {known[-1]:>9.4f}  {line}")
    return lines


def _epoch_table(state: RunState) -> list[str]:
    if not state.epochs:
        return []
    best = best_epoch(state.epochs, state.config)
    shown = [record for record in state.epochs[-MAX_EPOCHS:] if record is not best]
    if best is not None:
        shown = sorted([*shown, best], key=lambda record: _number(record, "epoch"))
    columns = {
        title: spec
        for title, spec in _EPOCH_COLUMNS.items()
        if any(spec[0] in record for record in shown)
    }
    rows = [
        [
            str(record.get("epoch", "?")) + ("*" if record is best else " "),
            *(_formatted(record.get(key), form) for key, form in columns.values()),
        ]
        for record in shown
    ]
    note = ["* best epoch, saved as best.pt"] if best is not None else []
    return [*_table(["epoch ", *columns], rows), *note]


def _rank_table(state: RunState) -> list[str]:
    last = _last_batch(state)
    ranks: Mapping[str, Sequence[Any]] = last.get("ranks") or {}
    own_ms = [number_of(value) for value in ranks.get("own_ms", [])]
    if not own_ms:
        return []
    slow_rank = last.get("slow_rank")
    shown = {title: spec for title, spec in _RANK_COLUMNS.items() if spec[0] in ranks}
    order = sorted(range(len(own_ms)), key=lambda rank: -own_ms[rank])[:MAX_RANKS]
    rows = [
        [
            f"{'slow ' if rank == slow_rank else ''}{rank}",
            *(_formatted(ranks[key][rank], form) for key, form in shown.values()),
        ]
        for rank in sorted(order)
    ]
    lines = _table(["rank", *shown], rows)
    if len(own_ms) > MAX_RANKS:
        lines.append(f"the slowest {MAX_RANKS} of {len(own_ms)} ranks")
    if isinstance(slow_rank, int) and slow_rank < len(own_ms):
        lines.append(
            f"rank {slow_rank} slows the others down: {own_ms[slow_rank]:.0f} ms per batch, "
            f"the others {others_ms(own_ms, slow_rank):.0f} ms (median)"
        )
    return lines


def _last_batch(state: RunState) -> Record:
    return state.batches[-1] if state.batches else {}


def _position(state: RunState) -> tuple[int, float, str]:
    """Return the number of finished epochs, the finished share of the current one, and its batch as
    text.
    """
    done = int(_number(state.epochs[-1], "epoch")) if state.epochs else 0
    last = _last_batch(state)
    if not last or _number(last, "epoch") <= done:
        return done, 0.0, ""
    batch = _number(last, "batch") + 1
    batches = _number(last, "num_batches")
    if not 0 < batches < math.inf:
        return done, 0.0, f"{batch:.0f}"
    return done, batch / batches, f"{batch:.0f}/{batches:.0f}"


def device_words(ranks: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the GPUs' mean utilisation, total power and highest temperature, as far as they are
    known.
    """
    words = []
    for name, form, join in (
        ("gpu_util", "GPU {:.0%}", statistics.fmean),
        ("gpu_power_w", "{:.0f} W", sum),
        ("gpu_temperature_c", "{:.0f} °C", max),
    ):
        known = [value for value in map(number_of, ranks.get(name, [])) if math.isfinite(value)]
        if known:
            words.append(form.format(join(known)))
    return words


def _formatted(value: Any, form: Callable[[float], str]) -> str:
    number = number_of(value)
    return form(number) if math.isfinite(number) else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, _, *lines = format_table(header, rows, right_from=0).splitlines()
    return [head, *lines]


def _number(record: Record, key: str) -> float:
    return number_of(record.get(key))
