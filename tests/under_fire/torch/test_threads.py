"""One model, many threads: every result is that of a call made alone, and the model is as it was found."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl


class Model(nn.Module):
    def __init__(self, rnn=None, dropout=0.3):
        super().__init__()
        self.rnn = nn.LSTM(3, 5, batch_first=True) if rnn is None else rnn
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.drop(self.rnn(x)[0]))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().train()


X, Y = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(4, 6, 2)
LOSS = nn.functional.mse_loss


def traced(model, **options):
    return rl.trace(model, X, Y, loss=LOSS, **options)["rnn"].hidden_grad.values


def on_threads(calls, workers=6):
    with ThreadPoolExecutor(workers) as pool:
        return [future.result(timeout=120) for future in [pool.submit(call) for call in calls]]


def test_one_model(model):
    verbs = {
        "trace": lambda: traced(model),
        "dropout": lambda: traced(model, training=True, seed=7),
        "gradients": lambda: rl.gradients(model, X, Y, loss=LOSS, wrt="rnn.hidden").values,
        "jacobian": lambda: rl.jacobian(model, X, measure="norm").values,
    }
    alone = {name: call() for name, call in verbs.items()}
    names = [*verbs] * 6
    for name, found in zip(names, on_threads([verbs[name] for name in names]), strict=True):
        np.testing.assert_array_equal(found, alone[name], err_msg=name)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_models_that_share_a_layer(model):
    other = Model(model.rnn, dropout=0.0).eval()
    model.rnn.train()
    calls = [lambda: traced(model), lambda: traced(other)] * 8
    alone = [traced(model), traced(other)]
    for i, found in enumerate(on_threads(calls)):
        np.testing.assert_array_equal(found, alone[i % 2])
    assert model.drop.training
    assert model.rnn.training
    assert not other.drop.training


def test_models_of_their_own_with_dropout_by_seed():
    """The generators are one for the process."""
    torch.manual_seed(3)
    models = [Model() for _ in range(6)]
    calls = [lambda m=m, s=s: traced(m, training=True, seed=s) for s, m in enumerate(models)]
    alone = [call() for call in calls]
    before = torch.get_rng_state()
    for found, expected in zip(on_threads(calls * 3), alone * 3, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_own_forward_in_another_thread_is_neither_recorded_nor_changed(model):
    """It runs while our hooks are on the model: in the middle of our own forward pass."""
    model.eval()
    expected, seen, reference = model(X[:2]), [], threading.local()

    def between(module, args, output):
        if getattr(reference, "own", False) or seen:
            return
        seen.append(None)  # once
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(60)

    def forward():
        reference.own = True
        seen.append(model(X[:2]))

    alone = rl.trace(model, X, Y, loss=LOSS, layers=["rnn", "drop"])
    handle = model.head.register_forward_pre_hook(lambda module, args: between(module, args, None))
    try:
        found = rl.trace(model, X, Y, loss=LOSS, layers=["rnn", "drop"])
    finally:
        handle.remove()
    assert torch.equal(seen[1], expected)
    assert seen[1].requires_grad
    assert found.layers == alone.layers
    np.testing.assert_array_equal(found["rnn"].hidden_grad, alone["rnn"].hidden_grad)
    np.testing.assert_array_equal(found["drop"].output, alone["drop"].output)


def test_a_call_within_a_call_and_an_interrupted_one_hold_nobody_up(model):
    def loss(output, target):
        traced(Model())
        return LOSS(output, target)

    def interrupted(output, target):
        raise KeyboardInterrupt

    rl.trace(model, X, Y, loss=loss)
    with pytest.raises(KeyboardInterrupt):
        rl.trace(model, X, Y, loss=interrupted)
    assert on_threads([lambda: traced(model)], workers=1)
    assert model.training


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_the_users_own_training_in_another_thread_goes_on_as_alone():
    """A call may say that weights changed under its hands; the training beside it is never the worse for it."""

    def trained(steps, beside):
        torch.manual_seed(5)
        model = Model(dropout=0.0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses, thread = [], threading.Thread(target=beside, args=(model,))
        thread.start()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = LOSS(model(X), Y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        thread.join(120)
        return model, losses

    ended = []

    def computed(model):
        for _ in range(8):
            try:
                ended.append(traced(model))
            except rl.errors.RnnlensError as error:
                ended.append(error)

    (alone, expected), (model, losses) = trained(300, lambda model: None), trained(300, computed)
    assert len(ended) == 8, "one ended in an error of somebody else"
    assert losses == expected
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
