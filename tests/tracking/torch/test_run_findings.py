"""Findings on a recorded training in torch, and the numbers behind them against weights that are saved by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rnnlens as rl
from rnnlens.cli import main as command_line
from rnnlens.cli.tail import ChosenScalars, print_lines, run_group
from rnnlens.errors import CallError, ModelError, TrackingWarning

STEPS = 12


class Echo(nn.Module):
    def __init__(self, cut=False):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.cut = cut

    def forward(self, x):
        out = self.lstm(x)[0][:, -1]
        return self.head(out.detach() if self.cut else out)


def batch():
    x = torch.randn(64, 10, 2, generator=torch.Generator().manual_seed(1))
    return x, x[:, -2, :1]


def train(path, net, optimizer, *, every=1, watch_batches=False, between=None):
    """Train for a few steps in a watch; return the run, and the weights before and after each step."""
    x, y = batch()
    watched = {} if watch_batches else {"probe": (x[:16], y[:16]), "loss": mse_loss}
    saved = []
    with rl.torch.watch(net, path, every=every, **watched) as watch:
        for i in range(STEPS):
            optimizer.zero_grad()
            watch.loss = loss = mse_loss(net(x), y)
            loss.backward()
            before = {name: p.detach().clone() for name, p in net.named_parameters()}
            optimizer.step()
            saved.append((before, {name: p.detach().clone() for name, p in net.named_parameters()}))
            if between is not None:
                between(i)
    return rl.open(path), saved


def by_code(run):
    return {finding.code: finding for finding in run.findings}


def ratio(before, after):
    change = (after.double() - before.double()).norm()
    return float(change / before.double().norm())


@pytest.mark.parametrize("watch_batches", [False, True], ids=["probe", "batch"])
@pytest.mark.parametrize("every", [1, 4])
def test_update_ratios_are_those_of_weights_saved_by_hand(tmp_path, watch_batches, every):
    torch.manual_seed(0)
    net = Echo()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    run, saved = train(tmp_path / "a.zarr", net, optimizer, every=every, watch_batches=watch_batches)
    steps = [step for step in run.steps.values if step]
    assert steps == [*range(every, STEPS + 1, every)]
    for name, parameter in net.named_parameters():
        recorded = run.scalar(f"update_ratio/{name}").sel(step=steps).values
        expected = [ratio(saved[step - 1][0][name], saved[step - 1][1][name]) for step in steps]
        np.testing.assert_allclose(recorded, expected, rtol=1e-6, err_msg=name)
        assert parameter.requires_grad
    matrices = ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"]
    expected = [np.median([ratio(saved[step - 1][0][m], saved[step - 1][1][m]) for m in matrices]) for step in steps]
    np.testing.assert_allclose(run.scalar("update_ratio").sel(step=steps).values, expected, rtol=1e-6)
    assert run.findings == []


@pytest.mark.parametrize("watch_batches", [False, True], ids=["probe", "batch"])
def test_a_learning_rate_far_too_small(tmp_path, watch_batches):
    torch.manual_seed(0)
    net = Echo()
    optimizer = torch.optim.Adam(net.parameters(), 1e-7)
    run, saved = train(tmp_path / "a.zarr", net, optimizer, watch_batches=watch_batches)
    (finding,) = run.findings
    matrices = [name for name, p in net.named_parameters() if p.ndim > 1]
    largest = max(np.median([ratio(before[m], after[m]) for m in matrices]) for before, after in saved)
    assert finding.code == "UPDATES_TOO_SMALL"
    assert finding.evidence["ratio"] == pytest.approx(largest, rel=1e-6)
    assert f"by more than {largest:.1e} of its norm" in finding.sentence
    assert f"In none of {STEPS} recorded steps" in finding.sentence
    assert "UPDATES_TOO_SMALL" in repr(run)


def test_a_learning_rate_far_too_large(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    run, saved = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.parameters(), 3.0))
    (finding,) = run.findings
    sizes = {name: np.sqrt(2 * p.numel() / sum(p.shape)) for name, p in net.named_parameters() if p.ndim > 1}
    changes = [[float((a[m].double() - b[m].double()).norm()) / size for m, size in sizes.items()] for b, a in saved]
    expected = float(np.median(np.median(changes, axis=1)))
    assert finding.code == "UPDATES_TOO_LARGE"
    assert finding.evidence["ratio_by_initial_norm"] == pytest.approx(expected, rel=1e-6)
    assert f"by {expected:.2g} times the norm" in finding.sentence


def test_a_training_that_is_not_finite_after_two_records(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.SGD(net.parameters(), 1e4), every=3)
    assert not np.isfinite(run.loss.values).all()
    (finding,) = run.findings
    assert finding.code == "UPDATES_TOO_LARGE"
    assert "the loss became infinite or NaN" in finding.sentence
    count = int(np.isfinite(run.scalar("update_by_initial_norm")).sum())
    assert count < 3
    assert f"over {count} recorded {'step' if count == 1 else 'steps'})" in finding.sentence


def test_weights_whose_gradient_is_zero_at_every_step(tmp_path):
    torch.manual_seed(0)
    net = Echo(cut=True)
    # AdamW shrinks weights without a gradient, if the gradient is 0 and not None
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    optimizer.zero_grad = lambda: [p.grad.zero_() for p in net.parameters()]
    run, saved = train(tmp_path / "a.zarr", net, optimizer)
    (finding,) = run.findings
    assert not torch.equal(saved[0][0]["lstm.weight_ih_l0"], saved[-1][1]["lstm.weight_ih_l0"])
    assert finding.code == "WEIGHTS_WITHOUT_GRADIENT"
    assert finding.severity == "fault"
    assert finding.evidence["weights"] == [name for name, p in net.named_parameters() if not p.grad.any()]
    assert "4 of 6 trained weights had no gradient" in finding.sentence


def test_a_layer_without_a_gradient_is_found_in_batch_mode(tmp_path):
    """Nothing of the layer can be recorded then, but the weights and their gradients can."""
    torch.manual_seed(0)
    net = Echo(cut=True)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with pytest.warns(TrackingWarning, match="lstm got no gradient.*only the change of the weights was recorded"):
        run, saved = train(tmp_path / "a.zarr", net, optimizer, watch_batches=True)
    (finding,) = run.findings
    assert finding.code == "WEIGHTS_WITHOUT_GRADIENT"
    assert finding.evidence["weights"] == [name for name, p in net.named_parameters() if p.grad is None]
    assert run.steps.values.tolist() == [*range(1, STEPS + 1)]
    ratios = run.scalar("update_ratio/head.weight").values
    expected = [ratio(before["head.weight"], after["head.weight"]) for before, after in saved]
    np.testing.assert_allclose(ratios, expected, rtol=1e-6)
    assert np.isfinite(run.scalar("loss").values).all()


def test_a_frozen_layer_is_found_in_batch_mode(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    net.lstm.requires_grad_(False)
    optimizer = torch.optim.Adam(net.head.parameters(), 1e-2)
    with pytest.warns(TrackingWarning, match="does not require a gradient"):
        run, _ = train(tmp_path / "a.zarr", net, optimizer, watch_batches=True)
    (finding,) = run.findings
    assert (finding.code, finding.evidence["layers"]) == ("FROZEN", ["lstm"])


def test_weights_that_the_optimizer_has_not_got(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    run, saved = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.lstm.parameters(), 1e-2))
    (finding,) = run.findings
    assert finding.code == "UPDATES_TOO_SMALL"
    assert finding.evidence["left_out"] == ["head.weight", "head.bias"]
    assert all(torch.equal(saved[0][0][name], saved[-1][1][name]) for name in finding.evidence["left_out"])
    assert "2 of 6 trained weights have a gradient and did not change at all in 12 recorded steps" in finding.sentence


def test_the_weights_of_a_second_optimizer_are_not_accused(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    first, second = (torch.optim.Adam(part.parameters(), 1e-2) for part in (net.lstm, net.head))

    class Both:
        zero_grad = staticmethod(lambda: (first.zero_grad(), second.zero_grad()))
        step = staticmethod(lambda: (first.step(), second.step()))

    run, _ = train(tmp_path / "a.zarr", net, Both)
    assert run.findings == []


def test_gradients_that_a_closure_computes_within_the_step(tmp_path):
    """As in Lightning and with LBFGS: before the step there are none."""
    torch.manual_seed(0)
    net, (x, y) = Echo(), batch()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    norms = []

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        loss.backward()
        norms.append(float(net.head.weight.grad.norm()))
        return loss

    with rl.torch.watch(net, tmp_path / "a.zarr", probe=(x[:16], y[:16]), loss=mse_loss, every=1):
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.step(closure)
    run = rl.open(tmp_path / "a.zarr")
    np.testing.assert_allclose(run.scalar("update_gradient/head.weight").values[1:], norms, rtol=1e-6)
    assert run.findings == []


def test_a_frozen_layer_and_one_that_is_thawed(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    net.lstm.requires_grad_(False)
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.parameters(), 1e-2))
    (finding,) = run.findings
    assert (finding.code, finding.severity, finding.layer) == ("FROZEN", "caution", "lstm")
    assert "No weight of lstm was trained at any of 13 records" in finding.sentence
    assert run["lstm"].trained.values.tolist() == [0.0] * 13

    def thaw(i):
        net.lstm.requires_grad_(i >= 5)

    run, _ = train(tmp_path / "b.zarr", net, torch.optim.Adam(net.parameters(), 1e-2), between=thaw)
    assert "FROZEN" not in by_code(run)


def test_fewer_than_three_recorded_steps_say_nothing(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.parameters(), 1e-8), every=6)
    assert run.findings == []


def test_a_loss_that_falls_acquits_small_updates(tmp_path):
    """Of a network whose output is far from the target because of one bias."""
    torch.manual_seed(0)
    net = Echo()
    with torch.no_grad():
        net.head.bias.fill_(1000.0)
    weights = [{"params": [net.head.bias], "lr": 100.0}, {"params": [*net.lstm.parameters(), net.head.weight]}]
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.Adam(weights, 1e-6))
    assert float(run.loss[-1]) < 0.5 * float(run.loss[0])
    assert float(run.scalar("update_ratio").max()) < 1e-5
    assert run.findings == []


def test_command_line_page_and_figure_of_a_run_with_a_finding(tmp_path, capsys):
    torch.manual_seed(0)
    net = Echo()
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.parameters(), 1e-7))
    (finding,) = run.findings
    with pytest.raises(SystemExit, match="0"):
        command_line(["show", str(tmp_path / "a.zarr"), "--json"])
    (shown,) = json.loads(capsys.readouterr().out)["findings"]
    assert (shown["code"], shown["sentence"]) == (finding.code, finding.sentence)
    assert shown["evidence"]["ratio"] == pytest.approx(finding.evidence["ratio"])
    print_lines(iter([run]), ChosenScalars())
    assert f"finding={finding}" in capsys.readouterr().out
    assert any(str(finding) == str(part) for part in run_group(run).renderables)
    assert "update_ratio/head.bias" not in ChosenScalars().names(run)
    html = Path(rl.report(run, path=tmp_path / "a.html")).read_text()
    assert "UPDATES_TOO_SMALL" in html
    assert 'href="#scalar-update-ratio"' in html
    assert 'id="scalar-update-ratio"' in html
    names = [ax.get_title() for ax in rl.plot.timeline(run)]
    assert names.count("change of a weight by one step, by its norm") == 1
    (panel,) = rl.plot.timeline(run, "update_ratio/*")
    assert len(panel.lines) == 6


def test_a_diagnosis_of_a_followed_training_is_sent_to_its_findings(tmp_path):
    torch.manual_seed(0)
    net = Echo()
    run, _ = train(tmp_path / "a.zarr", net, torch.optim.Adam(net.parameters(), 1e-2))
    with pytest.raises(CallError, match=r"missing a required argument: 'x'[^$]*run\.findings"):
        rl.diagnose(run)
    with pytest.raises(ModelError, match=r"run\.findings"):
        rl.diagnose(run, *batch())
    assert run.findings == []
