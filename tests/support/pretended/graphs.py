"""Pretended CUDA graphs: capturing records the operators below autograd, `replay` computes them
again in the same memory.

As with a real graph, capturing changes no tensor that was there before, and a replay reads and
writes the tensors that were captured. Capture in eager mode only sees tensors: values that the
program reads on the host are frozen, as on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = Callable[[], None]


class PretendedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    replays = 0  # of all graphs, for tests

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def replay(self) -> None:
        """Compute all recorded operators again."""
        PretendedGraph.replays += 1
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            for call in self.calls:
                call()


class capture(TorchDispatchMode):  # stands in for torch.cuda.graph
    """Stands in for `torch.cuda.graph`."""

    def __init__(
        self,
        graph: PretendedGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ):
        assert capture_error_mode == "thread_local", (
            "the loader's thread pins memory meanwhile (pretended GPU)"
        )
        assert pool is not None, "each of a step's graphs would keep its own memory (pretended GPU)"
        super().__init__()
        self.graph = graph
        self._made: set[int] = set()  # addresses of memory that the capture allocated
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made and address not in self._before:
                self._before[address] = (tensor, tensor.clone())
        result = function(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_new = [leaf.untyped_storage().data_ptr() not in given for leaf in made]
        self._made.update(
            leaf.untyped_storage().data_ptr() for leaf, new in zip(made, is_new, strict=True) if new
        )

        def call() -> None:
            again = [
                leaf
                for leaf in tree_leaves(function(*args, **kwargs))
                if isinstance(leaf, torch.Tensor)
            ]
            for leaf, new, value in zip(made, is_new, again, strict=True):
                if new and leaf.numel():
                    leaf.copy_(value)

        self.graph.calls.append(call)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor, value in self._before.values():
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.copy_(value)
