"""Whole programs from tutorials and public code: every verb against autograd on the unmodified model in float64."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch_programs
from torch import nn
from torch.utils import _pytree as pytree
from torch_programs import STRANGERS, TUTORIALS, leaves

import rnnlens as rl

PROGRAMS = TUTORIALS | STRANGERS
STATE_PATHS = [(name, path) for name, program in PROGRAMS.items() for path in program.states]


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch.compile itself reads .grad of every tensor that it traces.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


def make_case(name):
    torch.manual_seed(0)
    program = PROGRAMS[name]
    return program, program.build().double().eval(), program.x()


def call_model(model, x):
    return model(*x) if isinstance(x, tuple) else model(x)


def loss_of(output, target=None):
    return torch_programs.wave_loss(output)


def record_calls(model, x, path):
    """Return the model's output and the tensors that a module returned per call; the model continues with copies."""
    calls = []

    def hook(module, inputs, output):
        calls.append(list({id(leaf): leaf for leaf in leaves(output)}.values()))
        copies = {id(leaf): leaf.clone() for leaf in calls[-1]}
        return pytree.tree_map(lambda leaf: copies[id(leaf)], output)

    handle = model.get_submodule(path).register_forward_hook(hook)
    output = call_model(model, x)
    handle.remove()
    return output, calls


def assert_close(actual, expected):
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-12 * max(np.abs(expected).max(), 1e-3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_and_loss(name):
    program, model, x = make_case(name)
    trace = rl.trace(model, x, loss=loss_of, **program.options)
    assert list(trace) == program.layers
    assert trace.certificate.state == "passed"
    assert trace.loss == pytest.approx(float(loss_of(call_model(model, x)).detach()), rel=1e-12)
    layer_names = [info.name for info in rl.layers(model)]
    assert {layer.partition("#")[0] for layer in trace} <= set(layer_names)
    assert type(model).__name__.lower() not in layer_names


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_all_weights(name):
    program, model, x = make_case(name)
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False)]
    expected = torch.autograd.grad(loss_of(call_model(model, x)), parameters, allow_unused=True)
    gradients = rl.gradients(model, x, loss=loss_of, wrt="weights", **program.options)
    assert gradients.certificate.state == "passed"
    numbers = np.concatenate([np.ravel(array) for layer in gradients for array in gradients[layer].dataset.values()])
    reference = torch.cat([grad.flatten() for grad in expected if grad is not None]).numpy()
    assert_close(np.sort(numbers), np.sort(reference))


@pytest.mark.parametrize(("name", "path"), STATE_PATHS)
def test_states_and_their_total_gradients(name, path):
    program, model, x = make_case(name)
    output, calls = record_calls(model, x, path)
    step_states = [[call[index] for index in program.states[path]] for call in calls]
    tensors = [tensor for step in step_states for tensor in step]
    tensor_grads = iter(torch.autograd.grad(loss_of(output), tensors, allow_unused=True))
    samples = len(leaves(x)[0])
    grads = [
        sum(0 if grad is None else grad.reshape(samples, -1) for grad in (next(tensor_grads) for _ in step))
        for step in step_states
    ]
    expected = torch.stack([torch.zeros(samples, tensors[0].shape[-1]) + grad for grad in grads], 1).numpy()
    states = torch.stack([step[-1].detach().reshape(samples, -1) for step in step_states], 1).numpy()
    layer = rl.trace(model, x, loss=loss_of, **program.options)[path]
    assert_close(layer.hidden, states)
    assert_close(layer.hidden_grad, expected)
    gradients = rl.gradients(model, x, loss=loss_of, wrt=f"{path}.hidden", **program.options)
    assert_close(gradients, expected)
    assert gradients.certificate.state == "passed"


def jacobian_start(program, model, x):
    """Return the model's output and the tensors to differentiate it by: one list for all steps, or one per step."""
    if program.wrt.startswith("input"):
        first, *other_inputs = x if isinstance(x, tuple) else (x,)
        leaf = first.clone().requires_grad_()
        return call_model(model, (leaf, *other_inputs)), [[leaf]]
    path, _, kind = program.wrt.rpartition(".")
    output, calls = record_calls(model, x, path)
    return output, [call[:1] for call in calls] if kind == "output" else calls


def autograd_jacobian(output, steps, samples):
    """Return the Jacobian (sample, ..., ...) of an output whose samples do not depend on each other."""
    flat, leaf = output.reshape(samples, -1), steps[0][0]
    rows = []
    for column in flat.sum(0):
        tensor_grads = iter(
            torch.autograd.grad(column, [t for step in steps for t in step], retain_graph=True, allow_unused=True)
        )
        grads = [
            sum(0 if grad is None else grad.reshape(leaf.shape) for grad in (next(tensor_grads) for _ in step))
            for step in steps
        ]
        grads = [torch.zeros_like(leaf) + (grad if torch.is_tensor(grad) else 0) for grad in grads]
        grads = [grad if len(grad) == samples else grad.transpose(0, 1) for grad in grads]
        rows.append(grads[0] if len(grads) == 1 else torch.stack([grad.reshape(samples, -1) for grad in grads], 1))
    return torch.stack(rows, 1).reshape(*output.shape, *rows[0].shape[1:]).numpy()


@pytest.mark.parametrize("name", PROGRAMS)
def test_time_jacobians(name):
    program, model, x = make_case(name)
    output, steps = jacobian_start(program, model, x)
    output = program.arranged(leaves(output)[0])
    expected = autograd_jacobian(output, steps, len(output))
    jacobian = rl.jacobian(model, x, of=program.of, wrt=program.wrt, **program.options)
    assert jacobian.size == expected.size
    assert_close(np.asarray(jacobian).reshape(expected.shape), expected)
    assert jacobian.certificate.state in (("passed",) if program.wrt.startswith("input") else ("passed", "could not"))


class NestedOutput(nn.Module):
    """A model that returns a dict, a dataclass or a named tuple with parts that are nested or None."""

    def __init__(self, form):
        super().__init__()
        self.rnn, self.form = nn.GRU(3, 2, batch_first=True), form

    def forward(self, x):
        y = self.rnn(x)[0]
        forms = {
            "dict": {"none": None, "aux": (2 * y, 3 * y), "z": 4 * y},
            "record": torch_programs.Prediction(2 * y, 3 * y, {"z": 4 * y}),
            "named tuple": torch_programs.Memory(2 * y, [3 * y, 4 * y]),
        }
        return forms[self.form]


@pytest.mark.parametrize(
    ("form", "names"),
    {
        "dict": ["aux.0", "aux.1", "z"],
        "record": ["logits", "hidden", "loss.z"],
        "named tuple": ["h", "c.0", "c.1"],
    }.items(),
)
def test_outputs_have_the_names_of_their_places(form, names):
    torch.manual_seed(0)
    model, x = NestedOutput(form).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    reference = np.asarray(rl.jacobian(model, x, of="rnn.output"))
    for factor, name in enumerate(names, 2):
        assert_close(rl.jacobian(model, x, of=f"output[{name}]"), factor * reference)
    with pytest.raises(rl.errors.LayerNotFoundError, match=rf"did you mean|one of: '{names[0]}'"):
        rl.jacobian(model, x, of="output[w]")


def test_a_tied_weight_counts_once_in_the_norm_of_all_weights():
    _, model, x = make_case("language model")
    gradients = rl.gradients(model, x, loss=loss_of, clip={"global_clipnorm": 0.5})
    loss_of(call_model(model, x)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    assert gradients.clip["norm"] == pytest.approx(norm, rel=1e-12)
    for layer in ("encoder", "decoder"):
        assert_close(
            gradients.clipped[layer].dataset["weight"], (model.encoder.weight.grad * (1 + 1e-6 / norm)).numpy()
        )
