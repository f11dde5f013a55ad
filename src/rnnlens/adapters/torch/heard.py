"""The recurrent calls of somebody's training step, overheard: nothing is run, replaced or kept in the graph.

A forward hook sees what each call was fed and returned; a hook on the returned tensors hears the gradient that arrives
there in the user's own backward pass, which is the direct gradient: a fused kernel returns each step once. Cells in a
loop are heard by ``heard_loops.py``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .discover import describe, recurrent_modules, unwrapped
from .heard_call import HeardCall
from .heard_loops import HeardLoop, Loops, joined, listen_inside
from .heard_weights import WeightListener
from .inputs import on_leaves
from .record import autocast_around
from .weights import cell_weights, has_own_forward

#: No backward pass: torch counts them from 0.
NO_PASS = -1


class ModuleHook:
    """A hook of one module, whose errors go to ``failed``; a copy or a pickle of the module gets a hook without effect.

    Parameters
    ----------
    module
        The module that the hook is registered on.
    hook
        Called with what torch gives a hook of its kind; returns nothing.
    failed
        Called with an exception of ``hook``.
    """

    def __init__(self, module: nn.Module, hook: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._module, self._hook, self._failed = weakref.ref(module), hook, failed

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Run the hook, but not on a shallow copy, nor while torch traces the module into a graph."""
        if module is not self._module() or torch.jit.is_tracing():
            return
        try:
            self._hook(module, *arguments)
        except Exception as error:
            self._failed(error)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, returns None, and is Python's own


class Listener:
    """Hears torch's own recurrent layers, and cells, of a model while it trains.

    Parameters
    ----------
    model
        Left as it is; :meth:`remove` takes the hooks away.
    layers
        Names of layers, or None for all.
    whole
        Keep what a replay needs: inputs, weights, the state of the random generator.

    Attributes
    ----------
    calls
        Those that a gradient has arrived at, since :meth:`forget`. A forward whose graph dies without one, as in a
        validation, leaves nothing.
    backward
        Torch's number of the last backward pass that reached a layer; :data:`NO_PASS` before the first.
    passes, carried
        Backward passes that are accumulated in ``.grad``; whether it held gradients from before this step.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str] | None, *, whole: bool) -> None:
        self.model, self.whole = unwrapped(model), whole
        self._on = False
        self.calls: list[HeardCall | HeardLoop] = []
        self.forwards = self.evaluations = self.without_graph = 0
        self.passes, self.carried = 0, False
        self._forward, self.backward = 0, NO_PASS
        #: Whether a backward pass of this step built a graph (``create_graph=True``), as a gradient penalty does.
        self.differentiates_gradients = False
        #: Called with an error of a hook, which must not reach the user's forward or backward pass.
        self.failed: Callable[[Exception], None] | None = None
        self._states: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._loops = Loops()
        # A cell with a forward of its own may take its arguments in any order.
        self.heard = [
            (path, m)
            for path, m in recurrent_modules(self.model)
            if not (isinstance(m, nn.RNNCellBase) and has_own_forward(m))
        ]
        own = dict(self.heard)
        self.others = [row.name for row in describe(self.model) if row.name.partition("[")[0] not in own]
        if layers is not None:
            wanted = {name.partition("[")[0] for name in layers}
            self.heard = [(path, m) for path, m in self.heard if path in wanted]
        self.weights = WeightListener(self.heard, self.model.parameters())
        for path, module in self.heard:
            if isinstance(module, nn.RNNBase):
                before = ModuleHook(module, self._before(path), self._on_failure)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            after = ModuleHook(module, self._after(path), self._on_failure)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    @property
    def on(self) -> bool:
        """Whether to listen at all; a hook that does not listen returns at once."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        self._on = self.weights.on = value

    def batch(self) -> tuple[list[HeardCall], list[str]]:
        """What was heard since :meth:`forget`, in the order of the forward pass, and what is to be said of it."""
        return joined(sorted(self.calls, key=lambda call: call.number))

    def remove(self) -> None:
        """Take every hook away; what is heard of graphs that still live is dropped."""
        for handle in self._handles:
            handle.remove()
        self.weights.remove()
        self.on = False
        self.forget()

    def forget(self) -> None:
        """A step is over."""
        self.calls, self.passes, self.carried = [], 0, False
        self.weights.forget()
        self.forwards = self.evaluations = self.without_graph = 0
        self.differentiates_gradients = False

    def _on_failure(self, error: Exception) -> None:
        if self.failed is None:
            raise error
        self.failed(error)

    def _before(self, path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            if self.on and self.whole and module.training and module.dropout and module.num_layers > 1:
                self._states[id(module)] = torch.get_rng_state()

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self.on:
                hear = self._hear if isinstance(module, nn.RNNBase) else self._hear_cell
                hear(path, module, args, kwargs, output)

        return hook

    def _trains(self, returned: Iterable[Tensor]) -> bool:
        """Whether a call is one of training; counts it."""
        self.forwards += 1
        self.evaluations += not self.model.training
        graph = any(tensor.requires_grad for tensor in returned)
        self.without_graph += self.model.training and not graph
        return self.model.training and graph

    def _begun(self, path: str, module: Any, returned: Sequence[Tensor]) -> HeardCall:
        """A call, as far as it is the same for a fused layer and for a loop of cells."""
        self._forward += 1
        weights = _weights(module, _copied if self.whole else Tensor.detach)
        call = HeardCall(path, module, bool(module.training), weights, [t.detach() for t in returned])
        call.number, call.autocast = self._forward, autocast_around(returned[0])
        return call

    def _hear_cell(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        new = [output] if isinstance(output, Tensor) else list(output)
        if not self._trains(new):
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        state = given.get("hx")
        fed = given["input"], [] if state is None else [state] if isinstance(state, Tensor) else list(state)
        loop = self._loops.step(fed, new, lambda: self._begun(path, module, new))
        if self.whole:
            loop.inputs.append(_copied(fed[0]))
        listener = weakref.ref(self)
        listen_inside(loop, fed, new, lambda: (here := listener()) is not None and here.on)
        for place, tensor in enumerate(new):
            if tensor.requires_grad:
                tensor.register_hook(self._arrival(loop, (place, len(loop) - 1)))

    def _hear(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        state = self._states.pop(id(module), None)
        if not isinstance(output, tuple) or len(output) != 2:
            return  # a subclass whose own forward returns something else
        first, finals = output
        tensors = [first.data if isinstance(first, PackedSequence) else first]
        tensors += [finals] if isinstance(finals, Tensor) else list(finals)
        if not self._trains(tensors):
            return
        call = self._begun(path, module, tensors)
        call.random = state
        call.packed = first if isinstance(first, PackedSequence) else None
        if self.whole:
            call.args, call.kwargs = on_leaves(args, _copied), on_leaves(kwargs, _copied)
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._arrival(call, place))

    def _arrival(self, call: HeardCall | HeardLoop, place: Any) -> Any:
        # The hook alone keeps the call alive: it dies with the graph of a forward that nobody differentiates.
        listener = weakref.ref(self)

        def hook(grad: Tensor | None) -> None:
            here = listener()
            # None: the call has a gradient, at another of the tensors that it returned.
            if grad is None or here is None or not here.on:
                return
            if torch.is_grad_enabled():  # within a backward pass with create_graph=True
                here.differentiates_gradients = True
                return
            try:
                here._arrived(call, place, grad.detach().clone())
            except Exception as error:
                here._on_failure(error)

        return hook

    def _arrived(self, call: Any, place: Any, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.backward:
            self._begin(task, call)
        if call not in self.calls:
            self.calls.append(call)
        call.backwards.add(task)
        call.grads[place] = grad if place not in call.grads else call.grads[place] + grad

    def _begin(self, task: int, call: HeardCall | HeardLoop) -> None:
        """A backward pass has reached a layer: the first of this step, or one more, perhaps through a new forward."""
        self.backward = task
        fresh = self.weights.is_fresh((call.call if isinstance(call, HeardLoop) else call).module)
        self.carried = not fresh if not self.passes else self.carried and not fresh
        self.passes = 1 if fresh else self.passes + 1
        if fresh:
            self.weights.begin()
        if self.calls and not any(call is known for known in self.calls) and call.number > self.calls[-1].number:
            self.calls = []
            self.weights.forget_own()
        _queue(self._backward_ended)

    def _backward_ended(self) -> None:
        # Once more to the end of the queue: processes that train together average their gradients there.
        _queue(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        if self.on:
            self.weights.accumulated()


def _queue(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _weights(module: Any, taken: Callable[[Tensor], Tensor]) -> dict[tuple[int, str], dict[str, Tensor]]:
    return {
        (layer, direction): {slot: taken(weight) for slot, weight in weights.items()}
        for layer, direction, weights in cell_weights(module)
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
