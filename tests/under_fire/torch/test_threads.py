"""One model used by many threads: each result equals that of a single call, and the model is unchanged."""

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


def hidden_grad_of(model, **options):
    return rl.trace(model, X, Y, loss=LOSS, **options)["rnn"].hidden_grad.values


def call_on_threads(calls, workers=6):
    with ThreadPoolExecutor(workers) as pool:
        return [future.result(timeout=120) for future in [pool.submit(call) for call in calls]]


def test_one_model(model):
    verbs = {
        "trace": lambda: hidden_grad_of(model),
        "dropout": lambda: hidden_grad_of(model, training=True, seed=7),
        "gradients": lambda: rl.gradients(model, X, Y, loss=LOSS, wrt="rnn.hidden").values,
        "jacobian": lambda: rl.jacobian(model, X, measure="norm").values,
    }
    expected = {name: call() for name, call in verbs.items()}
    names = [*verbs] * 6
    for name, actual in zip(names, call_on_threads([verbs[name] for name in names]), strict=True):
        np.testing.assert_array_equal(actual, expected[name], err_msg=name)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_models_that_share_a_layer(model):
    sharing_model = Model(model.rnn, dropout=0.0).eval()
    model.rnn.train()
    calls = [lambda: hidden_grad_of(model), lambda: hidden_grad_of(sharing_model)] * 8
    expected = [hidden_grad_of(model), hidden_grad_of(sharing_model)]
    for i, actual in enumerate(call_on_threads(calls)):
        np.testing.assert_array_equal(actual, expected[i % 2])
    assert model.drop.training
    assert model.rnn.training
    assert not sharing_model.drop.training


def test_models_of_their_own_with_dropout_by_seed():
    """Calls with seeds on several threads equal single calls, though the process has only one generator."""
    torch.manual_seed(3)
    models = [Model() for _ in range(6)]
    calls = [lambda m=m, s=s: hidden_grad_of(m, training=True, seed=s) for s, m in enumerate(models)]
    results = [call() for call in calls]
    before = torch.get_rng_state()
    for actual, expected in zip(call_on_threads(calls * 3), results * 3, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_own_forward_in_another_thread_is_neither_recorded_nor_changed(model):
    """A forward pass in another thread, during a capture with hooks on the model, gives its usual result."""
    model.eval()
    expected, outputs, thread_local = model(X[:2]), [], threading.local()

    def start_forward(module, args, output):
        if getattr(thread_local, "own", False) or outputs:
            return
        outputs.append(None)  # start one thread only
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(60)

    def forward():
        thread_local.own = True
        outputs.append(model(X[:2]))

    reference = rl.trace(model, X, Y, loss=LOSS, layers=["rnn", "drop"])
    handle = model.head.register_forward_pre_hook(lambda module, args: start_forward(module, args, None))
    try:
        trace = rl.trace(model, X, Y, loss=LOSS, layers=["rnn", "drop"])
    finally:
        handle.remove()
    assert torch.equal(outputs[1], expected)
    assert outputs[1].requires_grad
    assert trace.layers == reference.layers
    np.testing.assert_array_equal(trace["rnn"].hidden_grad, reference["rnn"].hidden_grad)
    np.testing.assert_array_equal(trace["drop"].output, reference["drop"].output)


def test_a_call_within_a_call_and_an_interrupted_one_hold_nobody_up(model):
    def loss(output, target):
        hidden_grad_of(Model())
        return LOSS(output, target)

    def interrupting_loss(output, target):
        raise KeyboardInterrupt

    rl.trace(model, X, Y, loss=loss)
    with pytest.raises(KeyboardInterrupt):
        rl.trace(model, X, Y, loss=interrupting_loss)
    assert call_on_threads([lambda: hidden_grad_of(model)], workers=1)
    assert model.training


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_the_users_own_training_in_another_thread_goes_on_as_alone():
    """Training in another thread is unchanged by concurrent calls, which may raise that weights changed meanwhile."""

    def train(steps, concurrent):
        torch.manual_seed(5)
        model = Model(dropout=0.0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses, thread = [], threading.Thread(target=concurrent, args=(model,))
        thread.start()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = LOSS(model(X), Y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        thread.join(120)
        return model, losses

    results = []

    def compute(model):
        for _ in range(8):
            try:
                results.append(hidden_grad_of(model))
            except rl.errors.RnnlensError as error:
                results.append(error)

    (unwatched, expected), (model, losses) = train(300, lambda model: None), train(300, compute)
    assert len(results) == 8, "one ended in an error of somebody else"
    assert losses == expected
    for parameter, reference in zip(model.parameters(), unwatched.parameters(), strict=True):
        assert torch.equal(parameter, reference)
        assert torch.equal(parameter.grad, reference.grad)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
