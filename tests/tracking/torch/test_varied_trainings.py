"""Gradients captured from varied user models and training loops equal those of ``torch.autograd`` on a copy."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch_trainings import Reader, data, same_weights

import rnnlens as rl
from rnnlens.errors import TrackingWarning, UnsupportedError


class Packed(nn.Module):
    """A bidirectional GRU on packed, unsorted sequences of different lengths."""

    lengths = torch.tensor([5, 12, 3, 9])

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 1)

    def forward(self, x):
        packed = pack_padded_sequence(x, self.lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(outputs.sum(1) / self.lengths[:, None])


class LastState(nn.Module):
    """A time-first stacked LSTM whose loss reads only the last h and c of the upper layer."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 5, num_layers=2)
        self.head = nn.Linear(10, 1)

    def forward(self, x):
        _, (h, c) = self.rnn(x.transpose(0, 1))
        return self.head(torch.cat([h[-1], c[-1]], dim=-1))


class Translator(nn.Module):
    """An encoder LSTM, nested in ModuleDict and ModuleList, that passes its final state to a decoder."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": nn.ModuleList([nn.LSTM(3, 5, batch_first=True)])})
        self.rnn = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        _, state = self.parts["encoder"][0](x)
        return self.head(self.rnn(x.flip(1), state)[0].mean(1))


class Checkpointed(nn.Module):
    """An LSTM under activation checkpointing: it runs again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(checkpoint(lambda v: self.rnn(v)[0][:, -1], x, use_reentrant=False))


class Tuned(nn.Module):
    """An RNN with weight normalisation (computed weights), a frozen GRU below it and in-place operations above it."""

    def __init__(self):
        super().__init__()
        self.below = nn.GRU(3, 3, batch_first=True).requires_grad_(False)
        self.rnn = nn.utils.parametrizations.weight_norm(nn.RNN(3, 5, batch_first=True), "weight_hh_l0")
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        sequence = self.rnn(self.below(x)[0])[0]
        sequence = sequence * 2
        sequence += 1
        return self.head(sequence.relu_()[:, -3:].mean(1))


MODELS = [Packed, LastState, Translator, Checkpointed, Tuned]


def twin_of(model):
    """Return a new model with the same weights; deepcopy fails once a model has run with computed weights."""
    twin = type(model)()
    twin.load_state_dict(model.state_dict())
    return twin


def train_watched(model, x, y, steps=2, path=None):
    """Return the last captured batch and a copy of the model from before that batch's update."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with rl.torch.watch(model, path, every=1) as watch:
        for _ in range(steps):
            before = twin_of(model)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return watch.latest, before


@pytest.mark.parametrize("make", MODELS)
def test_a_captured_batch_equals_a_trace(make):
    torch.manual_seed(0)
    model, (x, y) = make(), data(4)
    batch, before = train_watched(model, x, y)
    expected = rl.trace(before, x, y, loss=mse_loss, training=True)
    assert expected.certificate.state == "passed"
    captured = [name for name in expected if name in batch]
    assert captured
    for layer in captured:
        for name in ("output", "output_grad", "hidden", "gates", "hidden_grad", "gate_grad", "input_grad"):
            actual, reference = batch[layer][name], expected[layer][name]
            assert actual.dims == reference.dims
            scale = max(float(abs(reference).max()), 1e-30)
            np.testing.assert_allclose(actual.values, reference.values, atol=1e-5 * scale, err_msg=f"{layer}.{name}")


def test_a_direct_gradient_is_that_of_torch():
    torch.manual_seed(0)
    model, (x, y) = Translator(), data(4)
    batch, before = train_watched(model, x, y)
    outputs = {}
    twin = twin_of(before)
    twin.rnn.register_forward_hook(lambda m, a, out: outputs.update(output=out[0]))
    twin.parts["encoder"][0].register_forward_hook(lambda m, a, out: outputs.update(h=out[1][0], c=out[1][1]))
    loss = mse_loss(twin(x), y)
    output, h, c = torch.autograd.grad(loss, [outputs["output"], outputs["h"], outputs["c"]])
    np.testing.assert_allclose(batch["rnn"].output_grad, output, atol=1e-7)
    final = batch["parts.encoder.0"].final_state_grad
    np.testing.assert_allclose(final.values.reshape(-1), torch.stack([h[0], c[0]], 1).reshape(-1), atol=1e-7)


def test_truncated_backpropagation():
    """Each chunk with a detached state is one step; two chunks with an undetached state are two calls in one step."""
    torch.manual_seed(0)
    rnn, head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 1)
    model = nn.ModuleDict({"rnn": rnn, "head": head})
    optimizer = torch.optim.Adam(model.parameters())
    x, y = data(4)
    with rl.torch.watch(model, every=1) as watch:
        state = None
        for chunk in x.split(4, dim=1):
            optimizer.zero_grad()
            sequence, state = rnn(chunk, state)
            state = tuple(s.detach() for s in state)
            mse_loss(head(sequence[:, -1]), y).backward()
            optimizer.step()
        assert watch.steps == 3
        assert watch.latest["rnn"].hidden_grad.sizes["time"] == 4
        optimizer.zero_grad()
        _, state = rnn(x[:, :6])
        sequence, _ = rnn(x[:, 6:], state)
        mse_loss(head(sequence[:, -1]), y).backward()
        optimizer.step()
    assert list(watch.latest) == ["rnn#0", "rnn#1"]
    assert float(abs(watch.latest["rnn#0"].hidden_grad).max()) > 0
    assert float(abs(watch.latest["rnn#0"].final_state_grad).max()) > 0


def test_a_step_that_a_loss_scale_skips_is_none():
    torch.manual_seed(0)
    model, (x, y) = Reader(), data(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with rl.torch.watch(model, every=1, scaler=scaler) as watch:
        for step in range(3):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watch.steps == 2
    assert watch.latest.passes == 1
    assert watch.latest.scale == 2.0**9
    assert np.isfinite(watch.latest["lstm"].output_grad).all()


@pytest.mark.usefixtures("bfloat16_lstm")
def test_autocast_and_a_loss_scale_at_once(tmp_path):
    """Recorded gradients are those of the unscaled loss, as torch and ``rl.gradients`` compute them in bfloat16."""
    torch.manual_seed(0)
    model, (x, y) = Reader(), data(8)
    model.dropout.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    half = torch.autocast("cpu", torch.bfloat16)
    with rl.torch.watch(model, tmp_path / "a.zarr", every=1) as watch:
        for _ in range(2):
            before = twin_of(model)
            optimizer.zero_grad()
            with half:
                loss = mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    before.dropout.p = 0.0
    batch, names = watch.latest, ["lstm.output", "lstm.hidden", "lstm/recurrent_kernel"]
    assert batch.scale == 2.0**10
    with half:
        grads = torch.autograd.grad(mse_loss(before(x), y), list(before.parameters()))
        gradients = rl.gradients(before, x, y, loss=mse_loss, wrt=names, training=True)
    assert gradients.certificate.state == "passed"  # passes within the rounding error of half precision
    captured = batch["lstm"].output_grad, batch["lstm"].hidden_grad, batch.weights["lstm"].recurrent_kernel_grad
    for name, actual in zip(names, captured, strict=True):
        reference = gradients[name].values.reshape(actual.shape)
        assert np.abs(reference).max() > 1e-4
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-6 * np.abs(reference).max())
    run = rl.open(tmp_path / "a.zarr")
    assert float(run.scalars["grad_norm"][-1]) == pytest.approx(float(torch.stack([g.norm() for g in grads]).norm()))
    assert float(run.scalars["grad_norm_clipped"][-1]) == pytest.approx(0.05, rel=1e-3)


class Loud(nn.LSTM):
    """An LSTM subclass that scales its output, so that it differs from torch's kernel."""

    def forward(self, x):
        sequence, state = super().forward(x)
        return sequence * 3, state


def test_a_forward_of_its_own_has_direct_gradients_and_no_replay(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = Loud(3, 5, batch_first=True), nn.Linear(5, 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    batch, _ = train_watched(Model(), *data(4))
    assert float(abs(batch["lstm"].output_grad).max()) > 0
    with pytest.raises(UnsupportedError, match="gives other numbers than the training step"):
        batch["lstm"].hidden_grad  # noqa: B018  the access is what is tested
    train_watched(Model(), *data(4), path=tmp_path / "a.zarr")
    run = rl.open(tmp_path / "a.zarr")
    assert (run["lstm"].direct > 0).all()
    assert run.steps.values.tolist() == [1, 2]
    assert [note for note in run.notes if "gives other numbers" in note] != []


def test_gradients_of_an_earlier_step_are_named():
    torch.manual_seed(0)
    model, (x, y) = Reader(), data(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with rl.torch.watch(model, every=1) as watch:
        for _ in range(2):  # without zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    assert any("not zeroed" in note for note in watch.latest.notes)


def test_a_fused_optimizer_unscales_by_itself():
    torch.manual_seed(0)
    model, (x, y) = Reader(), data(8)
    model.dropout.p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with rl.torch.watch(model, every=1) as watch:
        before = copy.deepcopy(model)
        scaler.scale(mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for module in before.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    grad = torch.autograd.grad(mse_loss(before(x), y), before.lstm.weight_hh_l0)[0]
    weights = watch.latest.weights["lstm"]
    for kernel_grad in (weights.recurrent_kernel_grad, weights.recurrent_kernel_grad_applied):
        assert np.linalg.norm(kernel_grad) == pytest.approx(float(grad.norm()), rel=1e-4)


class CellLoop(nn.Module):
    """An LSTMCell in a loop, below a fused LSTM that reads every state."""

    kind = nn.LSTMCell

    def __init__(self):
        super().__init__()
        self.cell, self.lstm, self.head = self.kind(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        state, states = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.head(self.lstm(torch.stack(states, 1))[0][:, -1])


class GRULoop(CellLoop):
    kind = nn.GRUCell


class RNNLoop(CellLoop):
    kind = nn.RNNCell


class Decoder(nn.Module):
    """Two stacked cells with learned initial states; the loss reads only the last states."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper, self.head = nn.LSTMCell(3, 4), nn.GRUCell(4, 5), nn.Linear(9, 1)
        self.start = nn.Parameter(torch.randn(4) * 0.3)

    def forward(self, x):
        h = c = self.start.expand(len(x), 4)
        above = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            h, c = self.lower(step, (h, c))
            above = self.upper(torch.tanh(h), above)
        return self.head(torch.cat([c, above], 1))


class Attentive(nn.Module):
    """A GRUCell with attention: its input depends on its previous state."""

    def __init__(self):
        super().__init__()
        self.cell, self.ask, self.head = nn.GRUCell(3, 4), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        state, total = x.new_zeros(len(x), 4), 0.0
        for _ in range(x.shape[1]):
            weights = torch.softmax(torch.einsum("ntf,nf->nt", x, self.ask(state)), 1)
            state = self.cell(torch.einsum("ntf,nt->nf", x, weights), state)
            total = total + self.head(state)
        return total


class Own(nn.Module):
    """A user-written recurrent cell."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(7, 4)

    def forward(self, x, state):
        return torch.tanh(self.inside(torch.cat([x, state], 1)))


class OwnLoop(CellLoop):
    @staticmethod
    def kind(features, units):
        return Own()

    def forward(self, x):
        state, states = x.new_zeros(len(x), 4), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.head(self.lstm(torch.stack(states, 1))[0][:, -1])


@pytest.mark.parametrize("make", [CellLoop, GRULoop, RNNLoop, Decoder, Attentive, OwnLoop])
def test_cells_in_a_loop_are_captured(make):
    """Direct gradients of h and c and all replayed quantities equal ``rl.trace`` with the weights before the update."""
    torch.manual_seed(0)
    model, (x, y) = make(), data(4)
    batch, before = train_watched(model, x, y)
    expected = rl.trace(before, x, y, loss=mse_loss, training=True)
    assert expected.certificate.state == "passed"
    assert set(batch) == set(expected)
    assert not batch.notes
    for layer in expected:
        names = {"output", "output_grad", "final_state_grad", "hidden", "cell", "gates"}
        names |= {"hidden_grad", "cell_grad", "gate_grad", "input_grad", "initial_state_grad"}
        for name in names & set(expected[layer]):
            actual, reference = batch[layer][name], expected[layer][name]
            assert actual.dims == reference.dims, f"{layer}.{name}"
            scale = max(float(abs(reference).max()), 1e-30)
            np.testing.assert_allclose(actual.values, reference.values, atol=1e-5 * scale, err_msg=f"{layer}.{name}")
    for name, slot in {"lower": "weight_hh", "cell": "weight_hh"}.items():
        if hasattr(getattr(before, name, None), slot):
            weight = getattr(getattr(before, name), slot)
            grad = torch.autograd.grad(mse_loss(before(x), y), weight)[0]
            kernel_grad = batch.weights[name].recurrent_kernel_grad
            assert np.linalg.norm(kernel_grad) == pytest.approx(float(grad.norm()), rel=1e-5)


class Chunked(CellLoop):
    """A cell loop that detaches its state in the middle."""

    def forward(self, x):
        state, total = None, 0.0
        for t, step in enumerate(x.unbind(1)):
            state = self.cell(step, tuple(s.detach() for s in state) if t == 6 else state)
            total = total + self.head(self.lstm(state[0][:, None])[0][:, 0])
        return total


class Masked(CellLoop):
    """A GRUCell loop with padding: samples that have ended keep their state, by ``torch.where`` at every step."""

    kind = nn.GRUCell

    def forward(self, x):
        state, states = x.new_zeros(len(x), 4), []
        for t, step in enumerate(x.unbind(1)):
            is_real = (torch.arange(len(x)) + 5 > t)[:, None]
            state = torch.where(is_real, self.cell(step, state), state)
            states.append(state)
        return self.head(self.lstm(torch.stack(states, 1))[0][:, -1])


class Fed(CellLoop):
    """A GRUCell loop whose input is its own state."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x):
        state = torch.zeros(len(x), 4) + x[:, 0, :1]
        states = [state := self.cell(state, state) for _ in range(x.shape[1])]
        return self.head(self.lstm(torch.stack(states, 1))[0][:, -1])


class OwnMasked(OwnLoop):
    forward = Masked.forward


def test_a_loop_in_pieces_is_captured_and_what_is_not_is_named():
    torch.manual_seed(0)
    batch, before = train_watched(Chunked(), *data(4))
    expected = rl.trace(before, *data(4), loss=mse_loss, training=True)
    assert any("its 12 calls are 2 recurrences of 6 to 6 steps" in note for note in batch.notes)
    for name in ("cell#0", "cell#1"):
        reference = expected[name].hidden_grad
        np.testing.assert_allclose(batch[name].hidden_grad, reference, atol=1e-5 * float(abs(reference).max()))
    batch, _ = train_watched(Masked(), *data(4))
    assert list(batch) == ["lstm"]
    assert any("cell: its state is changed between its steps" in note for note in batch.notes)
    batch, _ = train_watched(Fed(), *data(4))
    assert list(batch) == ["lstm"]
    assert any("cell: its own state is also its input" in note for note in batch.notes)
    batch, _ = train_watched(OwnMasked(), *data(4))
    assert list(batch) == ["lstm"]
    assert any("Not recorded in batch mode: cell." in note for note in batch.notes)
    with pytest.raises(UnsupportedError, match="cell"):
        rl.torch.watch(OwnMasked(), every=1, layers="head").__enter__()


def test_a_loop_of_cells_trains_as_it_would(tmp_path):
    """Watched and unwatched weights are equal bit for bit; a forward pass without backward is not counted."""
    trainings = []
    for path in (None, tmp_path / "a.zarr"):
        torch.manual_seed(0)
        model = nn.Sequential(Decoder())
        optimizer = torch.optim.Adam(model.parameters())
        x, y = data(16)
        with nullcontext() if path is None else rl.torch.watch(model, path, every=1) as watch:
            for _ in range(6):
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                model(x)  # no backward pass through this call
                optimizer.step()
        trainings.append(model)
    assert same_weights(*trainings)
    assert watch.latest.passes == 1
    run = rl.open(tmp_path / "a.zarr")
    assert len(run.steps) == 6
    assert list(run) == ["0.lower", "0.upper"]


class Adversaries(nn.Module):
    """A generator (maker) and a discriminator (judge), each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.maker, self.made = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)
        self.judge, self.verdict = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def make(self, noise):
        return self.made(self.maker(noise)[0])

    def judged(self, x):
        return self.verdict(self.judge(x)[0][:, -1])

    def loss_of_judge(self, x, noise):
        return mse_loss(self.judged(x), torch.ones(len(x), 1)) + self.judged(self.make(noise).detach()).square().mean()

    def loss_of_maker(self, noise):
        return mse_loss(self.judged(self.make(noise)), torch.ones(len(noise), 1))

    def train_against(self, path=None, followed="judge", steps=3):
        """Train both; return the captured batches and a copy with the weights before the last step of ``followed``."""
        judge = torch.optim.Adam([*self.judge.parameters(), *self.verdict.parameters()], 1e-2)
        maker = torch.optim.Adam([*self.maker.parameters(), *self.made.parameters()], 1e-2)
        x, noise = data(8)[0], data(8, seed=9)[0]
        options = {} if followed == "judge" else {"optimizer": maker}
        batches, before = [], {}
        with nullcontext() if path is None else rl.torch.watch(self, path, every=1, on_batch=batches.append, **options):
            for _ in range(steps):
                before["judge"] = copy.deepcopy(self.state_dict())
                judge.zero_grad()
                self.loss_of_judge(x, noise).backward()
                judge.step()
                before["maker"] = copy.deepcopy(self.state_dict())
                maker.zero_grad()
                self.loss_of_maker(noise).backward()
                maker.step()
        twin = Adversaries()
        twin.load_state_dict(before[followed])
        return batches, twin


@pytest.mark.parametrize("followed", ["judge", "maker"])
def test_two_optimizers_with_backward_passes_of_their_own(tmp_path, followed):
    """Each recorded step shows its own optimizer's backward pass, not that of the other optimizer."""
    torch.manual_seed(0)
    model, unwatched = Adversaries(), Adversaries()
    unwatched.load_state_dict(model.state_dict())
    unwatched.train_against()
    batches, twin = model.train_against(tmp_path / "a.zarr", followed)
    assert same_weights(model, unwatched)
    layers = ["judge#0", "judge#1"] if followed == "judge" else ["maker", "judge"]
    assert [list(batch) for batch in batches] == [layers] * 3
    x, noise = data(8)[0], data(8, seed=9)[0]
    loss = twin.loss_of_judge(x, noise) if followed == "judge" else twin.loss_of_maker(noise)
    judge_modules, opponent = (twin.judge, twin.verdict), (twin.maker, twin.made)
    weights = [p for module in (judge_modules if followed == "judge" else opponent) for p in module.parameters()]
    grads = torch.autograd.grad(loss, weights)
    kernel_norm, total_norm = float(grads[1].norm()), float(torch.stack([g.norm() for g in grads]).norm())
    norms = batches[-1].norms()
    assert norms["grad_norm"] == norms["grad_norm_clipped"] == pytest.approx(total_norm, rel=1e-5)
    for name in (
        f"{followed}/weight_grad_norm/recurrent_kernel",
        f"{followed}/weight_grad_norm_clipped/recurrent_kernel",
    ):
        assert norms[name] == pytest.approx(kernel_norm, rel=1e-5)
    opponent = {"judge": "maker", "maker": "judge"}[followed]
    assert (f"{opponent}/weight_grad_norm/recurrent_kernel" in norms) == (
        followed == "maker"
    )  # the maker's backward pass goes through both networks
    notes = rl.open(tmp_path / "a.zarr").notes
    assert any("Another optimizer stepped in between" in note for note in notes) == (followed == "judge")


def test_a_training_that_goes_on_in_evaluation_mode_is_named(tmp_path):
    """If ``model.train()`` is missing after a validation, a warning says why later gradients are not recorded."""
    torch.manual_seed(0)
    model, (x, y) = Reader(), data(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = rl.torch.watch(model, tmp_path / "a.zarr", every=1).__enter__()
    for step in range(5):
        if step == 2:
            model.eval()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    with pytest.warns(TrackingWarning, match=r"3 of the batches .* evaluation mode, .*model.train\(\); .* \(3 times\)"):
        watch.close()
    adjoint = rl.open(tmp_path / "a.zarr").scalar("lstm/adjoint")
    assert adjoint.step[np.isfinite(adjoint.values)].values.tolist() == [1, 2]


def test_a_layer_in_evaluation_mode_within_a_training():
    """A layer in evaluation mode applies no dropout, neither in the training step nor in the replay."""
    torch.manual_seed(0)
    model, (x, y) = Reader(num_layers=2, dropout=0.5), data(8)
    model.dropout.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.lstm.eval()
    with rl.torch.watch(model, every=1) as watch:
        before = copy.deepcopy(model.state_dict())
        mse_loss(model(x), y).backward()
        optimizer.step()
    twin = Reader(num_layers=2)
    twin.dropout.p = 0.0
    twin.load_state_dict(before)
    expected = rl.trace(twin, x, y, loss=mse_loss, training=True)
    for layer in expected:
        reference = expected[layer].hidden_grad
        np.testing.assert_allclose(watch.latest[layer].hidden_grad, reference, atol=1e-5 * float(abs(reference).max()))
