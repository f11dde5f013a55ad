"""Direct gradients of recurrent layers from the training step itself, without a second forward or backward pass.

On TensorFlow the step is compiled a second time, with identities that record gradients at the outputs of the layers. On
torch a hook on the output records its gradient. Neither changes a result of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...errors import LayerNotFoundError, UnsupportedError, did_you_mean
from ...typing import Array
from .dialect import dialect_of
from .discover import RecurrentSite, locate_layers
from .model_facts import KerasFacts
from .restore import overriding

#: Attribute of a compiled step that maps names of layers to the step compiled with taps at these layers.
_TAPPED_ATTRIBUTE = "_rnnlens_tapped"


@dataclass
class StepTensors:
    """Tensors of one training step, by layer name: outputs and their gradients, in the framework's time order."""

    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    loss: list[Any] = field(default_factory=list)


class DirectGradients:
    """Runner of training steps with taps at ``layers``; ``gradients`` contains the gradients of the last step.

    ``available`` is False if the step cannot be tapped: on ``tf_keras`` and JAX, with compiled torch, and with several
    steps per execution. Direct gradients are then computed in a separate run.
    """

    def __init__(self, model: Any, layers: Sequence[str], batches: int) -> None:
        self._model, self._keras = model, dialect_of(model)
        self._sites = _tappable_sites(model, layers)
        engine = self._keras.engine.name
        compiled = engine == "torch" and bool(getattr(model, "jit_compile", False))
        self.available = self._keras.name == "keras" and engine != "jax" and batches == 1 and not compiled
        self.gradients: dict[str, dict[str, Array]] | None = None
        self.loss: float | None = None
        self._step_tensors, self._scale = StepTensors(), 1.0

    def run(self, original: Callable[..., Any], batch: Any) -> Any:
        """Run one training step ``original(fed)`` with taps at the layers, which :meth:`read` reads afterwards."""
        self._scale, self.gradients, self.loss = KerasFacts(self._model).loss_scale, None, None
        if self._keras.engine.name == "torch":
            self._step_tensors = StepTensors()
            with _hooked_step(self._model, self._sites, self._step_tensors, _record_by_hook):
                return original(batch)
        compiled = vars(original).setdefault(_TAPPED_ATTRIBUTE, {})  # stored on the step that Keras compiled
        names = tuple(site.name for site in self._sites)
        if names not in compiled:
            compiled[names] = _compiled_tapped_step(self._model, self._sites)
        logs, tapped_tensors = compiled[names](batch)
        self._step_tensors = StepTensors(**tapped_tensors)
        return logs

    def read(self) -> None:
        """Read outputs, direct gradients and loss of the last step as arrays."""
        step_tensors, scale = self._step_tensors, self._scale
        to_array = self._keras.engine.to_array
        self.loss = float(to_array(step_tensors.loss[0])) if step_tensors.loss else None
        self.gradients = {}
        for site in self._sites:
            if site.name in step_tensors.gradients and site.name in step_tensors.outputs:
                output, gradient = step_tensors.outputs[site.name], step_tensors.gradients[site.name]
                arrays = {"output": to_array(output), "output_grad": to_array(gradient) / scale}
                self.gradients[site.name] = {name: _in_time_order(array, site) for name, array in arrays.items()}
        self._step_tensors = StepTensors()


def _compiled_tapped_step(model: Any, sites: Sequence[RecurrentSite]) -> Callable[..., Any]:
    """Compile the training step of ``model`` on TensorFlow with taps at ``sites``.

    It also returns the tapped tensors.
    """
    step = model.train_step

    def tapped_step(data: Any) -> Any:
        step_tensors = StepTensors()
        with _hooked_step(model, sites, step_tensors, _record_by_identity):
            logs = step(data)
        return logs, vars(step_tensors)

    return model._make_function(tapped_step)  # type: ignore[no-any-return]


@contextmanager
def _hooked_step(
    model: Any, sites: Sequence[RecurrentSite], step_tensors: StepTensors, tap: Callable[[Any, str, StepTensors], Any]
) -> Iterator[None]:
    """Within the block, record a training step's outputs, gradients and loss by overridden methods of the layers."""
    original_loss = model._compute_loss

    def compute_loss(*arguments: Any, **keywords: Any) -> Any:
        value = original_loss(*arguments, **keywords)
        step_tensors.loss.append(value)
        return value

    with overriding() as override:
        override(model, "_compute_loss", compute_loss)
        for site in sites:
            override(site.layer, "inner_loop", _recording_loop(site, step_tensors, tap))
        yield


def _recording_loop(
    site: RecurrentSite, step_tensors: StepTensors, tap: Callable[[Any, str, StepTensors], Any]
) -> Callable[..., Any]:
    original, layer, calls = site.layer.inner_loop, site.layer, count()

    def inner_loop(*arguments: Any, **keywords: Any) -> Any:
        last_output, outputs, states = original(*arguments, **keywords)
        if next(calls):  # a layer called again is not recorded: each call has its own gradient
            step_tensors.outputs.pop(site.name, None)
            return last_output, outputs, states
        if layer.return_sequences:
            return last_output, tap(outputs, site.name, step_tensors), states
        return tap(last_output, site.name, step_tensors), outputs, states

    return inner_loop


def _record_by_hook(tensor: Any, name: str, step_tensors: StepTensors) -> Any:
    """Record a torch tensor, and its gradient by a hook; return the tensor."""
    step_tensors.outputs[name] = tensor.detach()
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: step_tensors.gradients.__setitem__(name, gradient.detach()))
    return tensor


def _record_by_identity(tensor: Any, name: str, step_tensors: StepTensors) -> Any:
    """Record a TensorFlow tensor, and its gradient by an identity with a custom gradient; return the tensor."""
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: Any) -> Any:
        def backward(gradient: Any) -> Any:
            step_tensors.gradients[name] = gradient
            return gradient

        return tf.identity(value), backward

    step_tensors.outputs[name] = tensor
    return identity(tensor)


def _in_time_order(array: Any, site: RecurrentSite) -> Any:
    """Reverse the time axis of an output (sample, time, ...) if the layer runs backwards.

    It returns its last step first.
    """
    backwards = site.layer.go_backwards and site.layer.return_sequences
    return array[:, ::-1] if backwards else array


def _tappable_sites(model: Any, layers: Sequence[str]) -> list[RecurrentSite]:
    sites = locate_layers(model).sites
    supported = {site.name: site for site in sites if not site.bidirectional and not site.is_loop}
    for name in layers:
        if name in supported:
            continue
        site = next((site for site in sites if site.name == name), None)
        if site is None:
            raise LayerNotFoundError(f"No recurrent layer named {name!r}.", hint=did_you_mean(name, supported))
        kind = "a cell in a loop" if site.is_loop else "a bidirectional layer"
        problem = f"The direct gradients of {name!r}, {kind}, cannot be recorded in the training step."
        raise UnsupportedError(problem, hint="leave direct= out: rnnlens then computes them when you access them")
    return [supported[name] for name in layers]
