"""Muon's update of all matrices in few operators: a GPU computes a small product faster than it is
told to.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# a, b, c of a X + b (X X') X + c (X X')^2 X, Muon's polynomial
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Matrices are padded with zeros to the next larger size where this adds less than these shares of
# all multiplications.
TALLER, WIDER = 0.05, 0.005


class Orthogonaliser:
    """Brings the singular values of float32 matrices (M, N) near 1, times sqrt(M / N) where M > N.

    Five Newton-Schulz iterations leave them between 0.68 and 1.2; those below a thousandth of the
    largest stay smaller. Each iteration multiplies X by a polynomial of X X', so X X' alone is
    iterated, a much smaller matrix for a 3 x 3 convolution, and X is multiplied once by the product
    of the polynomials.

    It keeps memory for one matrix per weight, whose columns are in the order of the weight's
    memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        sizes = _batch_sizes([(len(weight), weight[0].numel()) for weight in weights])
        self.weights = weights
        self._memory = weights[0].new_empty(sum(size.rows * size.columns for size in sizes))
        self._order = sorted(range(len(weights)), key=lambda number: (sizes[number], number))
        self._groups: list[_Group] = []
        self._padding: list[torch.Tensor] = []
        places: dict[int, torch.Tensor] = {}
        offset = 0
        for size, batch in itertools.groupby(self._order, lambda number: sizes[number]):
            if not self._groups or self._groups[-1].height != size.height:
                self._groups.append(_Group(size.height))
            numbers = list(batch)
            end = offset + len(numbers) * size.rows * size.columns
            memory = self._memory[offset:end].view(len(numbers), -1)
            self._groups[-1].add(size, memory, [weights[number][0].numel() for number in numbers])
            for number, place in zip(numbers, memory, strict=True):
                weight = weights[number]
                places[number] = place.as_strided(weight.shape, _strides(weight))
                self._padding += [place[weight.numel() :]] if weight.numel() < len(place) else []
            offset = end
        # in shape and memory format of the weights
        self._places = [places[number] for number in range(len(weights))]

    def sum_of(
        self, gradients: list[torch.Tensor], momenta: list[torch.Tensor], momentum: float
    ) -> list[torch.Tensor]:
        """Return the orthogonalised gradient + momentum * momentum buffer of all weights, until the
        next call.
        """
        if self._padding:
            torch._foreach_zero_(self._padding)
        torch._foreach_copy_(self._places, gradients)
        torch._foreach_add_(self._places, momenta, alpha=momentum)
        norms = torch.stack(torch._foreach_norm([self._places[number] for number in self._order]))
        scales = norms.view(-1, 1, 1).clamp(min=1e-7).reciprocal()
        counts = [sum(group.counts) for group in self._groups]
        for group, *its_scales in zip(
            self._groups, scales.split(counts), scales.square().split(counts), strict=True
        ):
            group.orthogonalise(*its_scales)
        return self._places


class _Size(NamedTuple):
    """Rows and columns of the matrices of a batch after padding; `height` is that of X X', of X' X
    for a tall one.

    Those with more columns than rows are padded to (height, any). The others, tall ones, are not.
    """

    height: int
    is_tall: bool
    rows: int
    columns: int


@dataclass
class _Group:
    """Batches of matrices whose X X' have one height M after padding: first the wide ones, then the
    tall ones.

    The wide ones lie side by side on a sheet (M, sum of all widths), which `pieces` form.
    """

    height: int
    counts: list[int] = field(default_factory=list)  # matrices of each batch
    widths: list[int] = field(default_factory=list)  # of each batch of wide ones
    pieces: list[torch.Tensor] = field(default_factory=list)  # (M, any)
    tall: list[torch.Tensor] = field(default_factory=list)  # (K, rows, columns)

    def add(self, size: _Size, memory: torch.Tensor, widths: list[int]) -> None:
        """Add a batch: matrices with `widths` columns in the rows of `memory`
        (K, rows * columns).
        """
        self.counts.append(len(memory))
        if size.is_tall:
            self.tall.append(memory.view(-1, size.rows, size.columns))
            return
        self.widths.append(size.columns)
        for place, width in zip(memory, widths, strict=True):
            parts = place.split([size.rows * width, size.rows * (size.columns - width)])
            self.pieces += [part.view(size.rows, -1) for part in parts if len(part)]

    def orthogonalise(self, scales: torch.Tensor, squares: torch.Tensor) -> None:
        """Orthogonalise the matrices in place; `scales` (K, 1, 1) is one over their norms,
        `squares` their squares.
        """
        gram = scales.new_empty(len(scales), self.height, self.height)  # X X' of all
        if self.tall:
            gram.zero_()
        parts = gram.split(self.counts)
        sheet = torch.cat(self.pieces, 1) if self.pieces else scales.new_empty(self.height, 0)
        wide = self._wide_of(sheet)
        for part, values in zip(parts, wide, strict=False):  # the tall ones follow
            torch.bmm(values, values.mT, out=part)
        for part, values in zip(parts[len(wide) :], self.tall, strict=True):
            columns = values.shape[2]
            torch.bmm(values.mT, values, out=part[:, :columns, :columns])
        factors = _iterate(gram.mul_(squares))
        factors = factors.mul_(scales).split(self.counts)
        result = torch.empty_like(sheet)
        for factor, values, out in zip(factors, wide, self._wide_of(result), strict=False):
            torch.bmm(factor, values, out=out)
        for factor, values in zip(factors[len(wide) :], self.tall, strict=True):
            rows, columns = values.shape[1:]
            factor = factor[:, :columns, :columns]
            values.copy_(
                torch.baddbmm(values, values, factor, beta=0, alpha=math.sqrt(rows / columns))
            )
        if self.pieces:
            torch.split_with_sizes_copy(
                result, [piece.shape[1] for piece in self.pieces], 1, out=self.pieces
            )

    def _wide_of(self, sheet: torch.Tensor) -> list[torch.Tensor]:
        """Return the batches (K, height, width) of wide matrices as views of a sheet."""
        sizes = list(zip(self.counts, self.widths, strict=False))
        firsts = itertools.accumulate((count * width for count, width in sizes), initial=0)
        return [
            sheet.as_strided((count, self.height, width), (width, sheet.shape[1], 1), first)
            for (count, width), first in zip(sizes, firsts, strict=False)
        ]


def _iterate(gram: torch.Tensor) -> torch.Tensor:
    """Return the factors Q (K, M, M) that orthogonalise X of norm 1, from G = X X' (K, M, M).

    Each iteration has a polynomial P of G. Q is the product of all P. The next G is P G P; computed
    from Q it would lose its small eigenvalues. P multiplies G and Q at once: they lie side by side,
    with Q in the middle of three.
    """
    first, second, third = NEWTON_SCHULZ
    height = gram.shape[1]
    room = gram.new_empty(len(gram), height, 3 * height)
    left, product, right = room.split(height, 2)
    torch.baddbmm(gram, gram, gram, beta=second, alpha=third, out=product)
    product.diagonal(dim1=1, dim2=2).add_(first)
    torch.bmm(product, gram, out=right)
    gram = torch.bmm(right, product, out=left)
    for start in (0, height, 0):  # of G and Q, which are exchanged each time
        # without its multiple of 1
        polynomial = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        before, room = room[:, :, start : start + 2 * height], torch.empty_like(room)
        torch.baddbmm(
            before, polynomial, before, beta=first, out=room[:, :, start : start + 2 * height]
        )
        left, product, right = room.split(height, 2)
        half, gram = (right, left) if start else (left, right)
        torch.baddbmm(half, half, polynomial, beta=first, out=gram)
    polynomial = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
    return torch.baddbmm(product, polynomial, product, beta=first)


def _strides(weight: torch.Tensor) -> tuple[int, ...]:
    is_channels_last = weight.is_contiguous(memory_format=torch.channels_last)
    return (weight if is_channels_last else weight.contiguous()).stride()


def _batch_sizes(shapes: Sequence[tuple[int, int]]) -> list[_Size]:
    """Choose the batch of each matrix, given (rows, columns)."""
    by_height: dict[int, list[int]] = defaultdict(list)
    for shape in shapes:
        by_height[min(shape)].append(max(shape))

    def multiplications(height: int, widths: Iterable[int]) -> int:
        return sum(height * height * (18 * height + 2 * width) for width in widths)

    total = sum(multiplications(height, widths) for height, widths in by_height.items())
    heights = _join(
        by_height,
        lambda low, high: (
            multiplications(high, by_height[low]) - multiplications(low, by_height[low])
        ),
        TALLER * total,
    )
    by_width: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rows, columns in shapes:
        if rows <= columns:
            by_width[heights[rows]][columns] += 1
    widths = {
        height: _join(counts, functools.partial(_wider, height, counts), WIDER * total)
        for height, counts in by_width.items()
    }
    return [
        _Size(heights[columns], True, rows, columns)
        if rows > columns
        else _Size(heights[rows], False, heights[rows], widths[heights[rows]][columns])
        for rows, columns in shapes
    ]


def _wider(height: int, counts: dict[int, int], low: int, high: int) -> int:
    return 2 * height**2 * counts[low] * (high - low)


def _join(sizes: Iterable[int], added: Callable[[int, int], float], limit: float) -> dict[int, int]:
    """Map each size to the one to which it is padded; `added` are the multiplications for padding
    from one to another.
    """
    padded: dict[int, int] = {}
    joined: list[int] = []
    for size, following in itertools.pairwise([*sorted(sizes), 0]):
        joined.append(size)
        if not following or sum(added(low, following) for low in joined) > limit:
            padded.update(dict.fromkeys(joined, size))
            joined = []
    return padded
