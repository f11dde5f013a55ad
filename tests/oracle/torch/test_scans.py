"""Whole-sequence layers of Hugging Face models, against loops written from the papers and torch's autograd.

The loops read the arguments of the model's own scan function and share no code with the package.
"""

from __future__ import annotations

import html
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scan_loops import LOOPS, is_float, record_arguments
from scan_models import CASES, MODELS, build, tokens
from torch.nn import functional

import rnnlens as rl
from rnnlens.adapters.torch.scan_families import (
    FUNCTIONS,
    TESTED,
    Family,
    Reading,
    families,
    register,
)
from rnnlens.adapters.torch.scans import scan
from rnnlens.recurrence import sequence
from rnnlens.recurrence.matrix_chunk import MatrixChunk
from rnnlens.recurrence.sequence import SequenceCell

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 40


def loss_of(outputs, labels):
    return functional.cross_entropy(outputs.logits[:, -1].float(), labels)


def embedding_of(model):
    table = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is table)


def scan_arguments(model, ids):
    with record_arguments(model) as calls, torch.no_grad():
        model(ids, use_cache=False)
    return [{k: v.double() if is_float(v) else v for k, v in arguments.items()} for arguments in calls]


SLOW = [name for name, (family, *_) in MODELS.items() if family not in ("rg_lru", "rwkv", "mlstm", "lightning")]


@pytest.mark.parametrize(("name", "slow"), [*((name, False) for name in MODELS), *((name, True) for name in SLOW)])
def test_total_gradients_of_states_are_those_of_a_loop_in_float64(name, slow):
    model, ids = build(name).double(), tokens(2, STEPS)
    for key, weight in model.named_parameters():
        if slow and key.endswith("A_log"):
            torch.nn.init.constant_(weight, -6.0)
    with rl.options(certify="never"), record_arguments(model) as calls:
        trace = rl.trace(model, ids, ids[:, 0], loss=loss_of)
    assert len(trace) == len(calls)
    for layer, arguments in zip(trace, calls, strict=True):
        doubled = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()
        }
        dataset = trace[layer]
        leaves = {
            k: v.requires_grad_() for k, v in doubled.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
        states, out = LOOPS[MODELS[name][0]]({**doubled, **leaves})
        cotangent = torch.tensor(dataset.output_grad.values)
        assert float(cotangent.abs().max()) > 0
        grads = torch.autograd.grad((out * cotangent).sum(), states)
        for computed, reference in (
            (dataset.state, states),
            (dataset.state_grad, grads),
            (dataset.output, [out[:, t] for t in range(STEPS)]),
        ):
            reference = torch.stack([t.detach() for t in reference], 1).numpy()
            assert computed.dtype == np.float64
            assert np.abs(computed.values - reference).max() <= 1e-12 * np.abs(reference).max()


@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_the_unmodified_model(name):
    model, ids = build(name, scale=0.15), tokens(2, STEPS)
    with rl.options(certify="always"):
        trace = rl.trace(model, ids, ids[:, 0], loss=loss_of, at={"time": [0, -1]})
    assert trace.certificate.state == "passed"
    assert all(check.ok for check in trace.checks)
    assert trace[next(iter(trace))].state.sizes["time"] == 2


@pytest.mark.parametrize("name", MODELS)
def test_the_sweep_of_a_trace_keeps_no_graph(name, monkeypatch):
    """With one, its memory grows with the steps: 1.2 GiB at 65,536 steps of two heads of a delta rule."""
    has_graph, sweep = [], sequence.SequenceRun.sweep

    def recorded_sweep(run, *gradients):
        for chunk, grad in sweep(run, *gradients):
            has_graph.append(grad.requires_grad or chunk.states().requires_grad)
            yield chunk, grad

    monkeypatch.setattr(sequence.SequenceRun, "sweep", recorded_sweep)
    ids = tokens(2, STEPS)
    with rl.options(certify="never"):
        rl.trace(build(name), ids, ids[:, 0], loss=loss_of, at={"time": [0]})
    assert has_graph
    assert not any(has_graph)


@pytest.mark.parametrize("name", CASES)
def test_jacobian_of_a_logit_by_embeddings_is_autograds(name):
    model, ids = build(name), tokens(2, 9)
    logit = np.eye(1, 23, 5)[0]
    jacobian = rl.jacobian(
        model, ids, of="output", wrt=f"{embedding_of(model)}.output", reduce=logit, at={"out_time": [4, 8]}
    )
    values = model.get_input_embeddings()(ids).detach().requires_grad_()
    outputs = model(inputs_embeds=values, use_cache=False).logits
    for row, t in enumerate((4, 8)):
        for sample in range(2):
            (grad,) = torch.autograd.grad(outputs[sample, t, 5], values, retain_graph=True)
            computed = jacobian.values[sample, row, 0]
            assert np.abs(computed - grad[sample].numpy()).max() <= 1e-4 * float(grad.abs().max())
            assert not grad[1 - sample].any()


@pytest.mark.parametrize(
    "name", ["mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "rwkv", "xlstm", "minimax"]
)
def test_frozen_map_is_the_matrix_of_the_scan(name):
    """With coefficients held constant (frozen), a layer's Jacobian norms differ from the total ones and are causal."""
    model, ids = build(name), tokens(1, 7)
    layer = rl.layers(model)[0].name
    total = rl.jacobian(model, ids, of=f"{layer}.output", wrt=f"{layer}.input", measure="norm")
    frozen = rl.jacobian(model, ids, of=f"{layer}.output", wrt=f"{layer}.input", measure="norm", frozen=True)
    assert frozen.certificate.state == "could not"
    assert "arXiv:2403.01590" in frozen.attrs["definition"]
    assert not np.allclose(total.values, frozen.values, rtol=1e-2)
    assert np.allclose(np.triu(frozen.values[0], 1), 0)


def test_frozen_map_of_mamba_in_closed_form():
    """The scan's frozen Jacobian is alpha[t, k] = C_t (prod_{k < i <= t} a_i) dt_k B_k; arXiv:2403.01590, eq. 11."""
    model, ids = build("mamba").double(), tokens(1, 6)
    (arguments, *_) = scan_arguments(model, ids)
    dt = functional.softplus(arguments["dt"] + arguments["delta_bias"][:, None])[0]
    decay = torch.exp(dt[:, :, None] * arguments["A"][:, None])
    out, x = arguments["C"][0], arguments["B"][0]
    alpha = torch.zeros(dt.shape[0], 6, 6, dtype=torch.float64)
    for t in range(6):
        for k in range(t + 1):
            transition = decay[:, k + 1 : t + 1].prod(1)
            alpha[:, t, k] = (out[:, t] * transition * x[:, k] * dt[:, k, None]).sum(-1)
    values = torch.zeros(1, dt.shape[0], 6, dtype=torch.float64, requires_grad=True)
    call = SimpleNamespace(**{**arguments, "hidden_states": values, "D": None, "z": None})
    y, *_ = scan(FUNCTIONS["mamba_selective_scan"].read(call, torch.Tensor.detach).cell)
    for channel in (0, 5):
        for t in range(6):
            (grad,) = torch.autograd.grad(y[0, t, channel], values, retain_graph=True)
            assert torch.allclose(grad[0, channel], alpha[channel, t], rtol=1e-12, atol=1e-15)


def test_gradients_of_coefficients_are_autograds():
    """The backward pass of the linear-time scan equals autograd through the loop, for every coefficient."""
    for name in ("mamba", "mamba2", "qwen3_next", "kimi_linear", "xlstm"):
        model, ids = build(name).double(), tokens(2, 37)
        (arguments, *_) = scan_arguments(model, ids)
        leaves = {
            k: v.double().requires_grad_()
            for k, v in arguments.items()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
        _, expected = LOOPS[MODELS[name][0]]({**arguments, **leaves})
        family = next(f for f in families() if f.name == MODELS[name][0])
        y, *_ = scan(family.read(SimpleNamespace(**{**arguments, **leaves}), lambda t: t).cell)
        assert torch.allclose(y, expected, rtol=1e-11, atol=1e-13)
        cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        computed = torch.autograd.grad((y * cotangent).sum(), list(leaves.values()), allow_unused=True)
        reference = torch.autograd.grad((expected * cotangent).sum(), list(leaves.values()), allow_unused=True)
        for key, grad, reference_grad in zip(leaves, computed, reference, strict=True):
            assert (grad is None) == (reference_grad is None), key
            if reference_grad is not None:
                assert float((grad - reference_grad).abs().max()) <= 1e-12 * float(reference_grad.abs().max()), (
                    name,
                    key,
                )


def test_the_model_is_left_as_found_also_after_exceptions():
    model, ids = build("mamba"), tokens(2, 8)
    module = sys.modules[type(model).__module__]
    original = module.mamba_selective_scan
    model.config.use_cache = True
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]

    def interrupt(outputs, labels):
        raise KeyboardInterrupt

    rl.trace(model, ids, ids[:, 0], loss=loss_of)
    with pytest.raises(KeyboardInterrupt):
        rl.trace(model, ids, ids[:, 0], loss=interrupt)
    handle = model.backbone.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division"):
        rl.trace(model, ids, ids[:, 0], loss=loss_of)
    handle.remove()
    assert module.mamba_selective_scan is original
    assert model.config.use_cache is True
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())


def test_another_threads_forward_is_the_models_own():
    model, ids = build("mamba"), tokens(2, 8)
    module = sys.modules[type(model).__module__]
    patched, grad_nodes = [], []
    original = module.mamba_selective_scan

    def loss(outputs, labels):
        return loss_of(outputs, labels)

    def hook(*_):
        def call_scan():
            grad_nodes.append(module.mamba_selective_scan(*arguments).grad_fn)

        thread = threading.Thread(target=call_scan)
        thread.start()
        thread.join()
        patched.append(module.mamba_selective_scan is not original)

    leaf = torch.ones(1, 2, 3, requires_grad=True)
    arguments = (leaf, leaf, -torch.ones(2, 2), torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    handle = model.backbone.layers[0].mixer.register_forward_pre_hook(hook)
    rl.trace(model, ids, ids[:, 0], loss=loss)
    handle.remove()
    assert any(patched)
    assert all("Scan" not in type(node).__name__ for node in grad_nodes)


def test_rows_of_layers_and_no_false_recurrences():
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    rows = rl.layers(build("mamba"))
    assert [row.name for row in rows] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert "32 channels x 4 states" in repr(rows)
    assert "4 heads x 8 channels x 4 states" in repr(rl.layers(build("zamba2")))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=9,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    )
    assert len(rl.layers(t5)) == len(rl.layers(bart)) == 0


def test_a_moved_seam_is_refused_with_the_version_that_works(monkeypatch):
    model = build("mamba")
    module = sys.modules[type(model).__module__]

    monkeypatch.setattr(module, "mamba_selective_scan", lambda u, dt, A, B, C, **kwargs: u)
    with pytest.raises(rl.errors.UnsupportedError, match=f"(?s)other arguments.*expected: the arguments of {TESTED}"):
        rl.trace(model, tokens(1, 6))
    monkeypatch.undo()

    def forward(self, hidden_states, *_, **__):
        return hidden_states if hidden_states is not None else mamba_selective_scan()  # noqa: F821

    monkeypatch.setattr(type(model.backbone.layers[0].mixer), "forward", forward)
    with pytest.raises(rl.errors.UnsupportedError, match=f"(?s)without a call of its scan.*{TESTED}"):
        rl.trace(model, tokens(1, 6))


def test_hint_on_token_ids_works():
    model, ids = build("mamba"), tokens(1, 6)
    with pytest.raises(rl.errors.InputError, match=r'wrt="backbone\.embeddings\.output"'):
        rl.jacobian(model, ids)
    jacobian = rl.jacobian(model, ids, wrt="backbone.embeddings.output", measure="norm")
    assert jacobian.dims == ("sample", "out_time", "in_time")
    floats = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    input_jacobian = rl.jacobian(model, floats, measure="norm")
    assert input_jacobian.certificate.state == "passed"
    assert np.allclose(jacobian, input_jacobian, rtol=1e-4, atol=1e-6)


def test_positions_and_memory():
    model, ids = build("mamba"), tokens(2, 12)
    full = rl.trace(model, ids, ids[:, 0], loss=loss_of)["backbone.layers.0.mixer"]
    selected = rl.trace(model, ids, ids[:, 0], loss=loss_of, at={"time": [3, -1], "channel": slice(0, 4)})
    selected = selected["backbone.layers.0.mixer"]
    assert list(selected.state["time"].values) == [3, 11]
    for quantity in selected:
        expected = full[quantity].sel(time=[3, 11])
        expected = expected.isel(channel=slice(0, 4)) if "channel" in expected.dims else expected
        assert np.array_equal(selected[quantity], expected), quantity
    with pytest.raises(rl.errors.InputError, match="no dimension 'chanel'"):
        rl.trace(model, ids, at={"chanel": 0})
    with rl.options(memory="4 KiB"), pytest.raises(rl.errors.TooLargeError, match=r'at=\{"time": \[11\]\}'):
        rl.trace(model, ids)


def test_results_are_saved_and_opened(tmp_path):
    model, ids = build("qwen3_next"), tokens(2, 8)
    trace = rl.trace(model, ids, ids[:, 0], loss=loss_of)
    trace.save(tmp_path / "trace.nc")
    reopened = rl.open(tmp_path / "trace.nc")
    layer = next(iter(trace))
    assert list(reopened[layer]) == list(trace[layer])
    assert np.array_equal(reopened[layer].state_grad, trace[layer].state_grad)
    frozen = rl.jacobian(model, ids, of=f"{layer}.output", wrt=f"{layer}.input", measure="norm", frozen=True)
    frozen.save(tmp_path / "frozen.nc")
    assert np.array_equal(rl.open(tmp_path / "frozen.nc"), frozen)
    with pytest.raises(rl.errors.InputError, match="frozen=True holds"):
        rl.jacobian(torch.nn.LSTM(3, 4, batch_first=True), torch.zeros(1, 5, 3), frozen=True)


@pytest.mark.parametrize("quantity", ["state", "decay", "write", "read"])
def test_gradients_by_states_and_coefficients(quantity):
    model, ids = build("mamba2"), tokens(2, 12)
    layer = "backbone.layers.0.mixer"
    gradients = rl.gradients(model, ids, ids[:, 0], loss=loss_of, wrt=f"{layer}.{quantity}")
    assert gradients.certificate.state == "passed"
    assert np.array_equal(gradients, rl.trace(model, ids, ids[:, 0], loss=loss_of)[layer][f"{quantity}_grad"])
    with pytest.raises(rl.errors.UnsupportedError, match=r"one of the loss of a batch[\s\S]*measure="):
        rl.gradients(model, ids, ids[:, 0], loss=loss_of, wrt=f"{layer}.{quantity}", measure="norm")


def test_nonfinite_numbers_are_looked_for():
    model, ids = build("mamba"), tokens(8, 12)
    assert not rl.find_nonfinite(model, ids, ids[:, 0], loss=loss_of)


class Leaky(torch.nn.Module):
    """Two leaky channels s_t = a s_{t-1} + x_t with a = 1/2 and a = 0; the output is the sum of both."""

    def forward(self, x):
        decay = torch.tensor([0.5, 0.0], dtype=x.dtype).expand_as(x)
        return rl.torch.scan(decay, x)[:, -1].sum(-1, keepdim=True)


def test_diagnosis_of_a_scan_in_closed_form():
    """Lags from k on cause (1/4)^k 4/3 of the output variance 4/3 + 1: 14 % for k = 1, 3.6 % for k = 2; memory is 2."""
    model, x = Leaky(), torch.randn(512, 10, 2, generator=torch.Generator().manual_seed(0))
    diagnosis = rl.diagnose(model, x, model(x), loss="mse")
    layer, powers = diagnosis["scan"], 0.5 ** np.arange(10)
    assert int(diagnosis["model"].memory) == 2
    assert layer.attrs["cell"] == "affine_scan"
    assert layer.half_life.values[0] == pytest.approx(1.0, rel=1e-6)
    assert np.allclose(layer.adjoint, np.where(powers == 1, 1, powers / np.sqrt(2)), rtol=1e-5)
    assert np.allclose(layer.kappa[2:].values / layer.kappa[1:-1].values, 0.5, rtol=1e-4)
    assert "half of its state decays within" in diagnosis.sentences["scan"]
    assert int(diagnosis["model"].attributed_memory) >= 1


@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "qwen3_next",
        "xlstm",
        *(pytest.param(m, marks=pytest.mark.full) for m in ("mamba2", "recurrent_gemma", "zamba2")),
    ],
)
def test_measures_of_a_diagnosis_are_those_of_the_trace(name):
    model, ids = build(name), tokens(128, 12)
    with torch.no_grad():
        labels = model(ids, use_cache=False).logits[:, -1].argmax(-1)
    diagnosis = rl.diagnose(model, ids, labels, loss="cross_entropy")
    trace = rl.trace(model, ids[:8], labels[:8], loss=loss_of)
    weights = rl.weights(model, ids[:8], labels[:8], loss=loss_of)
    assert list(trace) == [name for name in diagnosis if name != "model"]
    for layer in trace:
        state, decay, dataset = trace[layer].state, trace[layer].decay, diagnosis[layer]
        if name != "xlstm":
            dims = [dim for dim in decay.dims if dim not in ("sample", "time")]
            expected = rl.measures.decay_half_life(decay.transpose("sample", "time", *dims).values)
            assert dataset.half_life.dims == tuple(dims)
            assert np.allclose(dataset.half_life, expected, rtol=1e-5)
        if state.ndim > 3:
            expected = np.median(rl.measures.effective_rank(state.values[:, -1]), axis=0)
            assert np.allclose(dataset.state_rank, expected, rtol=1e-4)
        assert ("half_life" in dataset) == (name != "xlstm")
        if layer in weights:
            for key in dataset.data_vars.keys() & {"half_life", "state_rank", "state_size"}:
                assert np.allclose(weights[layer][key], dataset[key])


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_what_the_last_state_holds_of_the_first_is_the_product_of_the_decays(name, tmp_path):
    model, ids = build(name), tokens(8, 12)
    weights, trace = rl.weights(model, ids, ids[:, 0], loss=loss_of), rl.trace(model, ids)
    weights.save(tmp_path / "weights.nc")
    for layer in trace:
        decay = trace[layer].decay.prod("time")
        inner = [dim for dim in decay.dims if dim not in ("sample", "channel" if name == "mamba" else "head")]
        expected = np.sqrt((decay**2).mean(inner)).median("sample")
        for carried in (weights[layer].state_carried, rl.open(tmp_path / "weights.nc")[layer].state_carried):
            assert carried.lag.values.tolist() == [12]
            np.testing.assert_allclose(carried.isel(lag=0), expected, rtol=1e-5)


#: The argument of a scan function that is its input, and its axis of steps.
SCAN_INPUTS = {"mamba": ("hidden_states", 2), "mamba2": ("hidden_states", 1), "gated_delta": ("value", 1)}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next"])
def test_influence_of_a_token_is_that_of_autograd_with_the_coefficients_held(name):
    model, ids = build(name).double(), tokens(3, 34)
    with record_arguments(model) as calls:
        weights = rl.weights(model, ids, ids[:, 0], loss=loss_of)
    family = MODELS[name][0]
    layers = [layer for layer in weights if "token_influence" in weights[layer]]
    assert layers
    assert len(calls) % len(layers) == 0
    argument, axis = SCAN_INPUTS[family]
    for layer, recorded in zip(layers, calls, strict=False):
        arguments = {k: v.double() if is_float(v) else v for k, v in recorded.items()}
        values, per_head = arguments[argument], family != "mamba"
        shape = [1, *(size if i == axis or (per_head and i == 2) else 1 for i, size in enumerate(values.shape) if i)]

        def outputs(gains, *, arguments=arguments, values=values):
            return LOOPS[family]({**arguments, argument: values * gains})[1]

        jacobian = torch.autograd.functional.jacobian(outputs, torch.ones(shape).double(), vectorize=True)
        squares = jacobian.square().sum((1, 3) if per_head else (1, 2)).flatten(2 if per_head else 1)
        if per_head:
            heads = squares.shape[1]
            squares = squares.reshape(3, heads, 34, heads)[:, range(heads), :, range(heads)].permute(1, 2, 0)
        influence, interval = weights[layer].token_influence, weights[layer].token_influence_interval
        np.testing.assert_allclose(influence, squares.mean(0).sqrt(), rtol=1e-9, err_msg=layer)
        assert influence.dims == ("time", "head")[: 1 + per_head]
        assert interval.dims == ("bound", *influence.dims)
        assert (interval.sel(bound="low") <= influence).all()
        assert (interval.sel(bound="high") >= influence).all()
    assert "token_influence_interval" not in rl.weights(model, ids[:1], ids[:1, 0], loss=loss_of)[layers[0]]


def test_the_loss_after_pruning_is_that_of_the_model_with_these_entries_cut_by_hand():
    model, ids = build("mamba").double(), tokens(3, 20)
    mixer = model.backbone.layers[0].mixer
    first = mixer.time_step_rank
    weak = slice(first, first + mixer.ssm_state_size // 2)
    with torch.no_grad():
        mixer.x_proj.weight[weak] *= 1e-3  # what writes half of the state units of every channel
    layer = "backbone.layers.0.mixer"
    result = rl.weights(model, ids, ids[:, 0], loss=loss_of, keep=(1, 0.5, 0))[layer]
    energy, losses = result.state_energy, result.loss_after_pruning
    assert energy.dims == ("channel", "state_unit")
    half = mixer.ssm_state_size // 2
    assert float(energy[:, :half].max()) < float(energy[:, half:].min())
    expected = []
    with torch.no_grad():
        for rows in (slice(0), weak, slice(first, first + 2 * half)):
            mixer.x_proj.weight[rows] = 0
            expected.append(float(loss_of(model(ids, use_cache=False), ids[:, 0])))
    assert abs(expected[1] - expected[0]) > 1e-8 * expected[0]
    np.testing.assert_allclose(losses.sel(kept=[1, 0.5, 0]), expected, rtol=1e-12)
    lstm, x = torch.nn.LSTM(3, 4), torch.randn(2, 5, 3)
    with pytest.raises(rl.errors.UnsupportedError, match="none ran"):
        rl.weights(lstm, x, x, loss=lambda outputs, _: outputs[0].sum(), keep=1)
    with pytest.raises(rl.errors.InputError, match="shares"):
        rl.weights(model, ids, ids[:, 0], loss=loss_of, keep=(0.5, 2))


def test_energy_of_the_keys_of_a_delta_rule_is_that_of_a_loop():
    model, ids = build("qwen3_next").double(), tokens(3, 20)
    with record_arguments(model) as calls:
        weights = rl.weights(model, ids, ids[:, 0], loss=loss_of, keep=0.5)
    layer = next(name for name in weights if "loss_after_pruning" in weights[name])
    energy, arguments = weights[layer].state_energy, {k: v.double() if is_float(v) else v for k, v in calls[0].items()}
    assert energy.dims == ("head", "key")
    states, _ = LOOPS["gated_delta"](arguments)
    heads = torch.arange(energy.sizes["head"]) // (energy.sizes["head"] // arguments["query"].shape[2])
    query = arguments["query"]
    if arguments["use_qk_l2norm_in_kernel"]:
        query = query / torch.sqrt((query * query).sum(-1, keepdim=True) + 1e-6)
    added = torch.stack(states, 1) * (query[:, :, heads] / query.shape[-1] ** 0.5)[..., None]
    np.testing.assert_allclose(energy, added.square().mean((0, 1, 4)), rtol=1e-8)


def test_padding_half_precision_and_training_mode():
    ids = tokens(4, 16)
    mask = (torch.arange(16)[None] >= torch.arange(4)[:, None]).long()
    padded = {"input_ids": ids, "attention_mask": mask}
    for name in ("mamba", "mamba2", "qwen3_next", "minimax"):
        for model, x, training in (
            (build(name), padded, False),
            (build(name).bfloat16(), ids, False),
            (build(name, tie_word_embeddings=True), ids, False),
            (build(name), ids, True),
        ):
            trace = rl.trace(model, x, ids[:, 0], loss=loss_of, training=training)
            assert trace.certificate.state == "passed", (name, training)


@pytest.mark.parametrize("name", MODELS)
def test_listed_sizes_are_those_of_the_states(name):
    model = build(name)
    trace = rl.trace(model, tokens(1, 3), at={"time": [-1]}, quantities=["state"])
    for row in rl.layers(model):
        if row.name in trace:
            assert dict(row.state_axes) == {dim: trace[row.name].state.sizes[dim] for dim, _ in row.state_axes}


def test_rwkv_before_its_weights_are_rescaled_is_refused_with_what_to_type():
    model = build("rwkv").train()
    model(tokens(1, 4))
    with pytest.raises(rl.errors.UnsupportedError, match=r"(?s)changes its weights.*model\.eval\(\); model\(x\) once"):
        rl.trace(model, tokens(1, 4), training=False)


def test_states_of_rwkv_are_those_of_the_models_cache():
    model, ids = build("rwkv"), tokens(2, 12)
    trace = rl.trace(model, ids, at={"time": [-1]})
    cache = model(ids, use_cache=True).state
    for number, layer in enumerate(trace):
        for index in (0, 1):
            expected = cache[2 + index][:, :, number].detach()
            assert np.allclose(trace[layer].state[:, 0, :, index], expected, rtol=1e-5, atol=1e-7)


def my_leaky_scan(x, keep):
    """Return the states s_t = keep s_{t-1} + x_t of a third party's scan."""
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = keep * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


class ThirdParty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.keep = 4, torch.nn.Parameter(torch.tensor([0.5, 0.8, 0.9, 1.0]))
        self.project = torch.nn.Linear(3, 4)

    def forward(self, x):
        return my_leaky_scan(self.project(x), self.keep)


def test_a_third_party_registers_its_family(monkeypatch):
    def read_call(call, hold):
        cell = SequenceCell(("channel",), (hold(call.keep)[None, None],), (call.x,), logarithmic=False)
        return Reading(cell, lambda states, last: states)

    monkeypatch.setattr("rnnlens.adapters.torch.scan_families.FUNCTIONS", dict(FUNCTIONS))
    family = Family("leaky", ("channel",), (("width",),), read_call)
    register("my_leaky_scan", family)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(ThirdParty(), torch.nn.Linear(4, 1)), torch.randn(2, 9, 3)
    (row,) = rl.layers(model)
    assert (row.name, row.cell, row.state_axes) == ("0", "leaky", (("channel", 4),))
    trace = rl.trace(model, x, loss=lambda y: (y[:, -1] ** 2).sum())
    assert trace.certificate.state == "passed"
    states = my_leaky_scan(model[0].project(x), model[0].keep)
    states.retain_grad()
    assert np.allclose(trace["0"].state, states.detach(), rtol=1e-6)
    total = rl.jacobian(model, x, of="output", wrt="input", measure="norm")
    assert total.certificate.state == "passed"
    with pytest.raises(rl.errors.InputError, match=r"exists[\s\S]*known: mamba"):
        register("my_leaky_scan", family)
    with pytest.raises(rl.errors.InputError, match="name of a scan function"):
        register("a name", family)


def test_a_report_draws_states_and_gradients_by_channel(tmp_path):
    model, ids = build("mamba"), tokens(64, 12)
    page = html.unescape(rl.report(model, ids, ids[:, 0], loss=loss_of, path=tmp_path / "report.html").read_text())
    assert "MambaMixer, 32 channels" in page
    assert "Gradient by channel" in page
    assert "Norm of the state of each channel" in page
    trace = rl.trace(model, ids, ids[:, 0], loss=loss_of)
    codes = re.findall(r"<code>(rl\.plot.*trace\[.*)</code>", page)
    assert any("curves((trace" in code for code in codes)
    assert all(eval(code, {"rl": rl, "trace": trace}) is not None for code in codes)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "minimax"])
def test_a_fault_in_the_sweep_is_found_beside_the_rounding_of_scans(name, monkeypatch):
    """A sweep that is wrong by 1 % fails the certificate; minimax's router gradient, zero up to rounding, passes."""
    model, ids = build(name), tokens(12, 40)
    certificate = rl.gradients(model, ids, ids[:, 0], loss=loss_of, wrt="weights").certificate
    assert certificate.state == "passed"
    pull_step, pull_back = sequence._pull_step, MatrixChunk.pull_back
    monkeypatch.setattr(sequence, "_pull_step", lambda *args: 1.01 * pull_step(*args))
    monkeypatch.setattr(MatrixChunk, "pull_back", lambda chunk, direct, later: pull_back(chunk, direct, 1.5 * later))
    certificate = rl.gradients(model, ids, ids[:, 0], loss=loss_of, wrt="weights").certificate
    assert certificate.state == "failed"


def test_gradients_by_one_of_several_scans_of_a_layer():
    model, ids = build("zamba"), tokens(2, 6)
    trace = rl.trace(model, ids, ids[:, 0], loss=loss_of)
    assert trace.layers[0].endswith("#0")
    gradients = rl.gradients(model, ids, ids[:, 0], loss=loss_of, wrt=f"{trace.layers[0]}.state")
    assert np.array_equal(gradients, trace[trace.layers[0]].state_grad)
