"""A whole training step as one CUDA graph: forward, backward and update, launched by the host at once.

A small batch is bound by the host: it takes longer to launch the step's thousand kernels than the GPU takes to run them. A graph holds
them all; replaying it costs one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps before the capture: kernels are compiled and the optimizer makes its states in the first


class CapturedStep:
    """``loss = step(input_ids, labels=labels)`` trains ``model`` by one step of ``optimizer``.

    Every call is a training step: the first three run as they are, the next is captured in a CUDA graph, and that one and all later ones are
    replays of it. The step is forward, backward, ``before_update()`` if given (for example to clip the gradients), and
    ``optimizer.step()``; gradients of an earlier step are dropped. The loss (a scalar of its own, on the device) is that of before the update.

    Keyword arguments are those of the model's call, tensors all of them; their shapes and dtypes must not change. On a GPU the optimizer must be
    capturable (``AdamW(..., capturable=True)``), and a learning rate that changes must be a tensor. The graph keeps the memory of a
    step's activations. On a CPU, where there is nothing to capture, each call is an ordinary step.

    Raises a ValueError for an optimizer that is not capturable, for inputs unlike those of the first call, and for a number of the
    optimizer (a learning rate) that has changed since the capture, as the graph would go on with the old one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, before_update: Callable[[], Any] | None = None) -> None:
        self.model, self.optimizer, self.before_update = model, optimizer, before_update
        self.device = next(model.parameters()).device
        self.steps = 0
        self._inputs: dict[str, Tensor] = {}  # what the graph reads
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.empty(())
        self._numbers: list[dict[str, Any]] = []
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            for group in optimizer.param_groups:
                if group.get("capturable") is False:
                    raise ValueError(
                        f"optimizer: {type(optimizer).__name__} was made with capturable=False, so its step cannot be captured; "
                        "make it with capturable=True"
                    )

    @property
    def captured(self) -> bool:
        """Whether calls are replays of a graph by now."""
        return self._graph is not None

    def __call__(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        """One training step; the loss."""
        self._take(dict(inputs, input_ids=input_ids))
        self.steps += 1
        if self.device.type != "cuda":
            return self._step().detach()
        if self._graph is None and self.steps <= WARM_UP:
            with _on_stream(self._stream):
                loss = self._step().detach()
            loss.record_stream(torch.cuda.current_stream(self.device))
            return loss
        if self._graph is None:
            self._capture()
        self._check_numbers()
        self._graph.replay()  # type: ignore[union-attr]
        return self._loss.clone()

    def _step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(**self._inputs).loss
        loss.backward()
        if self.before_update is not None:
            self.before_update()
        self.optimizer.step()
        return loss

    def _take(self, inputs: dict[str, Tensor]) -> None:
        """Copy the inputs to where the graph reads them."""
        for name, x in inputs.items():
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: is a {type(x).__name__}; expected a tensor, as a graph reads nothing else anew")
        if not self._inputs:
            self._inputs = {name: x.to(self.device, copy=True) for name, x in inputs.items()}
            return
        shapes, expected = ({name: (tuple(x.shape), x.dtype) for name, x in each.items()} for each in (inputs, self._inputs))
        if shapes != expected:
            raise ValueError(f"inputs: {shapes} came and the first call had {expected}; make another CapturedStep for other shapes")
        for name, x in inputs.items():
            self._inputs[name].copy_(x, non_blocking=True)

    def _capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # the captured backward then makes the gradients, and each replay makes them again
        self._numbers = self._now()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step().detach()
        self._graph = graph  # not before: a capture that fails leaves nothing to replay

    def _now(self) -> list[dict[str, Any]]:
        """The optimizer's numbers, group by group: a graph holds them as they were."""
        groups = self.optimizer.param_groups
        return [{k: v for k, v in group.items() if isinstance(v, (int, float, tuple))} for group in groups]

    def _check_numbers(self) -> None:
        for before, now in zip(self._numbers, self._now(), strict=True):
            for name, value in now.items():
                if before.get(name) != value:
                    raise ValueError(
                        f"optimizer: {name} was {before.get(name)!r} when the step was captured and is {value!r} now; "
                        f"pass it as a tensor ({name}=torch.tensor(...)), which may be changed in place"
                    )


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on a stream after what is queued on the current one, which then waits for it."""
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
