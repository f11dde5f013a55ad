"""Check that an adapter fulfils its contract: captures that replay, and gradients that are those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..adapters.protocol import Adapter, Batch, Capture, Port, RecurrentCall, Taps
from ..arguments import anything, checked, number
from ..errors import InputError
from .reference import bptt, weight_gradients

_CALL = "check_adapter(adapter_for(model), model, Batch(x, y, loss=loss))"


@checked(adapter=anything, model=anything, batch=anything, rtol=number(above=0))
def check_adapter(adapter: Adapter, model: Any, batch: Batch, *, rtol: float = 1e-6) -> list[str]:
    """Check that ``adapter`` fulfils the contract of an adapter on one model and batch.

    Parameters
    ----------
    adapter
        An adapter, such as :func:`rnnlens.adapters.registry.adapter_for` returns.
    model
        A model with at least one recurrent layer, of a few units; the reference is slow.
    batch
        Data of a few steps with float input, and a loss. The model must be deterministic unless ``batch.seed`` is
        given.
    rtol
        Tolerance relative to the largest magnitude of each array: for example 1e-10 for float64, 1e-4 for float32.

    Returns
    -------
    list of str
        Names of the checks that passed.

    Raises
    ------
    InputError
        If the arguments are no adapter, a model that it owns, and a batch.
    AssertionError
        At the first failed check, with the layer and the quantity in the message.
    """
    if not isinstance(adapter, Adapter) or not isinstance(batch, Batch) or not adapter.owns(model):
        got = f"{type(adapter).__name__}, {type(model).__name__}, {type(batch).__name__}"
        raise InputError("These are no adapter, model of it, and batch.", got=got, hint=_CALL)
    capture = adapter.run(model, batch, Taps.direct(weight_grads=True)).capture
    checks: list[tuple[str, Callable[[], None]]] = [
        ("describe names every node", lambda: _check_names(adapter, model, capture)),
        ("shapes follow the conventions", lambda: _check_calls(capture, _check_shapes)),
        ("a second capture is the same", lambda: _check_repeatable(adapter, model, batch, capture, rtol)),
        ("outputs replay", lambda: _check_calls(capture, lambda call: _check_replay(call, rtol))),
        ("weight gradients are the reference's", lambda: _check_weights(capture, rtol)),
        ("pull back agrees with capture", lambda: _check_pullback(adapter, model, batch, capture, rtol)),
        ("less asked, less given", lambda: _check_request(adapter, model, batch, capture, rtol)),
    ]
    for name, check in checks:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{adapter.name}: {name}: {error}") from error
    return [name for name, _ in checks]


def close(got: Any, wanted: Any, rtol: float, what: str) -> None:
    """Raise AssertionError if ``got`` and ``wanted`` differ by more than ``rtol`` times the largest magnitude wanted.

    The scale is at least 1e-3.
    """
    got, wanted = np.asarray(got, dtype=float), np.asarray(wanted, dtype=float)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, expected {wanted.shape}"
    scale = max(float(np.abs(wanted).max(initial=0.0)), 1e-3)
    worst = float(np.abs(got - wanted).max(initial=0.0)) / scale
    assert worst <= rtol, f"{what}: off by {worst:.2g} of the largest value, allowed {rtol:.2g}"


def reference_of(call: RecurrentCall) -> Any:
    """Run float64 BPTT on a captured call of a known cell, starting from the captured direct gradients."""
    grads = None if call.final_state_grad is None else [np.asarray(g, dtype=float) for g in call.final_state_grad]
    return bptt(
        call.cell,
        np.asarray(call.input, dtype=float),
        [np.asarray(s, dtype=float) for s in call.initial_state],
        _output_cotangent(call),
        mask=None if call.mask is None else np.asarray(call.mask),
        backward=call.direction == "backward",
        final_state_grad=grads,
    )


def _output_cotangent(call: RecurrentCall) -> Any:
    """Return the output's direct gradient as a cotangent of h at every step; zero where the output is a constant."""
    samples, steps = call.input.shape[:2]
    grad = np.zeros((samples, steps, call.output.shape[-1]))
    if call.output_grad is not None:
        time_index = slice(None) if call.returns_sequences else _last_step(call)
        grad[:, time_index] = np.asarray(call.output_grad)
    return grad if call.output_from_state is None else grad * np.asarray(call.output_from_state)[..., None]


def _last_step(call: RecurrentCall) -> int:
    return 0 if call.direction == "backward" else call.input.shape[1] - 1


def _check_calls(capture: Capture, check: Callable[[RecurrentCall], None]) -> None:
    for call in capture.calls:
        check(call)


def _has_reference(call: RecurrentCall) -> bool:
    return not call.cell.by_framework and call.input_scale is None and call.state_scale is None


def _check_names(adapter: Adapter, model: Any, capture: Capture) -> None:
    names = {info.name for info in adapter.known_layers(model)}
    for call in capture.calls:
        assert {call.layer, call.layer.rpartition("#")[0]} & names, f"{call.layer!r} is not among {sorted(names)}"


def _check_shapes(call: RecurrentCall) -> None:
    samples, steps = call.input.shape[:2]
    leading_shape = (samples, steps) if call.returns_sequences else (samples,)
    assert tuple(call.output.shape[:-1]) == leading_shape, f"{call.layer}: output {tuple(call.output.shape)}"
    sizes = call.cell.state_sizes
    assert [tuple(s.shape) for s in call.initial_state] == [(samples, n) for n in sizes], f"{call.layer}: initial_state"
    if call.mask is not None:
        assert tuple(call.mask.shape) == (samples, steps), f"{call.layer}: mask {tuple(call.mask.shape)}"
        assert "bool" in str(call.mask.dtype), f"{call.layer}: mask of {call.mask.dtype}"
    if call.output_grad is not None:
        assert call.output_grad.shape == call.output.shape, f"{call.layer}: output_grad"


def _check_repeatable(adapter: Adapter, model: Any, batch: Batch, capture: Capture, rtol: float) -> None:
    second_capture = adapter.run(model, batch, Taps.direct(weight_grads=True)).capture
    assert [c.layer for c in second_capture.calls] == [c.layer for c in capture.calls]
    for first_call, second_call in zip(capture.calls, second_capture.calls, strict=True):
        close(second_call.output, first_call.output, rtol, f"{first_call.layer} output")
        close(second_call.output_grad, first_call.output_grad, rtol, f"{first_call.layer} output_grad")


def _check_replay(call: RecurrentCall, rtol: float) -> None:
    if not _has_reference(call):
        return
    reference = reference_of(call)
    expected = reference.states[0]
    if call.output_from_state is not None:
        expected = expected * np.asarray(call.output_from_state)[..., None]
    expected = expected if call.returns_sequences else expected[:, _last_step(call)]
    close(call.output, expected, rtol, f"{call.layer} output")
    for i, state in enumerate(call.final_state or ()):
        close(state, reference.states[i][:, _last_step(call)], rtol, f"{call.layer} final_state[{i}]")


def _check_weights(capture: Capture, rtol: float) -> None:
    """Check weight gradients, summed over all calls that share weights, against the framework's."""
    sums: dict[str, dict[str, Any]] = {}
    framework_grads: dict[str, Any] = {}
    skipped_keys = {call.weights_key for call in capture.calls if not _has_reference(call) or call.weight_grads is None}
    for call in capture.calls:
        if call.weights_key in skipped_keys:
            continue
        framework_grads[call.weights_key] = call.weight_grads
        grads = _weight_gradients(call)
        total = sums.setdefault(call.weights_key, dict.fromkeys(grads, 0.0))
        for name, grad in grads.items():
            total[name] = total[name] + grad
    for key, total in sums.items():
        for name, grad in total.items():
            close(framework_grads[key][name], grad, rtol, f"{key} {name}")


def _weight_gradients(call: RecurrentCall) -> Any:
    reference = reference_of(call)
    backward = call.direction == "backward"
    states_before = []
    for i, states in enumerate(reference.states):
        initial_state = np.asarray(call.initial_state[i], dtype=float)[:, None]
        parts = [states[:, 1:], initial_state] if backward else [initial_state, states[:, :-1]]
        states_before.append(np.concatenate(parts, axis=1))
    mask = None if call.mask is None else np.asarray(call.mask)
    x = np.asarray(call.input, dtype=float)
    return weight_gradients(call.cell, x, states_before, reference.returned_grads, mask=mask)


def _check_pullback(adapter: Adapter, model: Any, batch: Batch, capture: Capture, rtol: float) -> None:
    calls = [call for call in capture.calls if call.output_grad is not None]
    ports = {
        index: Port("output", call.layer, direction=call.direction if call.bidirectional else None)
        for index, call in enumerate(calls)
    }
    with adapter.run(model, batch, Taps.ports([Port("loss")], list(ports.values()))) as run:
        gradients = run.pull({Port("loss"): np.ones(1)})
        for index, port in ports.items():
            close(run.values[port], calls[index].output, rtol, f"value of {port}")
            grad = gradients[port]
            pulled_grad = np.zeros(calls[index].output.shape) if grad is None else np.asarray(grad)[0]
            close(pulled_grad, calls[index].output_grad, rtol, f"gradient of {port}")


def _check_request(adapter: Adapter, model: Any, batch: Batch, capture: Capture, rtol: float) -> None:
    name = capture.calls[-1].layer
    partial_capture = adapter.run(model, batch, Taps.direct((name,))).capture
    assert {call.layer for call in partial_capture.calls} == {name}, (
        f"asked for {name!r}, got {[c.layer for c in partial_capture.calls]}"
    )
    assert all(call.weight_grads is None for call in partial_capture.calls), "weight gradients that were not asked for"
    forward_capture = adapter.run(model, batch, Taps.states()).capture
    assert all(call.output_grad is None for call in forward_capture.calls), "gradients that were not asked for"
    assert forward_capture.loss is None, "a loss that was not asked for"
    loss_capture = adapter.run(model, batch, Taps.states(loss=True)).capture
    assert loss_capture.loss is not None, "no loss, though it was asked for"
    close(loss_capture.loss, capture.loss, rtol, "loss without gradients")
