"""The network's forward and backward pass as CUDA graphs.

A GPU can compute the kernels of a small batch faster than the host launches them one by one. A
graph launches all of them at once. The kernels are those that run without it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from yolo_seg_ddp.utils.devices import Precision

MOST_SHAPES = 2  # of batches: the sizes of an epoch's batches differ by at most one image
# Of the GPU's memory. A graph keeps the memory of its step, also during validation; larger steps
# seldom wait for the host.
MOST_MEMORY_SHARE = 0.25


class GraphedNetwork:
    """Calls a network in training: the first batch of a shape as usual, later ones of that shape as
    CUDA graphs.

    The network must run the same operators in every step and read no value on the host. The first
    batch shows for which outputs the loss has a gradient. Outputs are overwritten by the next call.
    Gradients share memory with the graph: set them to None between two steps, and do not accumulate
    them.
    """

    def __init__(self, network: nn.Module, device: torch.device, precision: Precision) -> None:
        self.network = network
        self.device = device
        self.precision = precision
        self._differentiated: dict[Any, list[bool]] = {}
        self._graphs: dict[Any, _Graphs | None] = {}

    def __call__(self, inputs: torch.Tensor) -> Any:
        """Return what the network returns for a batch of inputs."""
        shape = (tuple(inputs.shape), inputs.stride(), inputs.dtype)
        if shape not in self._differentiated:
            if len(self._differentiated) == MOST_SHAPES:
                return self.network(inputs)
            outputs = self.network(inputs)
            self._differentiated[shape] = _watch_gradients(outputs)
            return outputs
        if shape not in self._graphs:
            total_bytes = torch.cuda.get_device_properties(self.device).total_memory
            has_room = (
                torch.cuda.max_memory_allocated(self.device) <= MOST_MEMORY_SHARE * total_bytes
            )
            used = self._differentiated[shape]
            self._graphs[shape] = (
                _Graphs(self.network, inputs, used, self.precision) if has_room else None
            )
        graphs = self._graphs[shape]
        return self.network(inputs) if graphs is None else graphs(inputs)


def _watch_gradients(outputs: Any) -> list[bool]:
    """Return a list with an item for each tensor of the outputs, which becomes True when the tensor
    gets a gradient.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    has_gradient = [False] * len(tensors)

    def note(position: int) -> Callable[[torch.Tensor], None]:
        return lambda _: has_gradient.__setitem__(position, True)

    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            tensor.register_hook(note(position))
    return has_gradient


class _Graphs:
    """A network's two graphs for one shape of inputs.

    Capturing them computes nothing and changes no weight or statistic.
    """

    def __init__(
        self, network: nn.Module, inputs: torch.Tensor, is_used: list[bool], precision: Precision
    ) -> None:
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.inputs = inputs.clone()
        self.is_used = is_used
        self.forward = torch.cuda.CUDAGraph()
        self.backward = torch.cuda.CUDAGraph()
        # Other threads may go on pinning memory for the loader.
        capture: dict[str, Any] = {
            "pool": torch.cuda.graph_pool_handle(),
            "capture_error_mode": "thread_local",
        }
        # Without a cache the weights are converted in the graph, each time.
        with (
            torch.cuda.graph(self.forward, **capture),
            precision.autocast(inputs.device, cache=False),
        ):
            outputs = network(self.inputs)
        self.leaves, self.form = pytree.tree_flatten(outputs)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        used = [tensor for tensor, uses in zip(tensors, is_used, strict=True) if uses]
        self.output_gradients = [torch.empty_like(tensor) for tensor in used]
        with torch.cuda.graph(self.backward, **capture):
            self.gradients = torch.autograd.grad(
                used, self.weights, self.output_gradients, allow_unused=True
            )
        self.outputs = [tensor.detach() for tensor in tensors]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def __call__(self, inputs: torch.Tensor) -> Any:
        """Compute the outputs of a batch."""
        tensors = iter(_Replay.apply(self, inputs, *self.weights))
        return pytree.tree_unflatten(
            [next(tensors) if leaf is None else leaf for leaf in self.leaves], self.form
        )


class _Replay(torch.autograd.Function):
    """Replays the graphs as one operator with a backward pass."""

    @staticmethod
    def forward(
        context: Any, graphs: _Graphs, inputs: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        context.graphs = graphs
        graphs.inputs.copy_(inputs)
        graphs.forward.replay()
        outputs = tuple(tensor.detach() for tensor in graphs.outputs)
        unused = [tensor for tensor, uses in zip(outputs, graphs.is_used, strict=True) if not uses]
        context.mark_non_differentiable(*unused)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the weights."""
        graphs: _Graphs = context.graphs
        used = [gradient for gradient, uses in zip(gradients, graphs.is_used, strict=True) if uses]
        torch._foreach_copy_(graphs.output_gradients, used)
        graphs.backward.replay()
        return (
            None,
            None,
            *(None if gradient is None else gradient.detach() for gradient in graphs.gradients),
        )
