import copy
import math
import pickle

import numpy as np
import pytest
import xarray as xr

from rnnlens import __version__
from rnnlens.errors import LayerNotFoundError, QuantityNotFoundError
from rnnlens.results.checks import Check
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace, TracedLayer, describe_layer

from .conftest import gru_dataset, lstm_dataset


def message_of(error):
    return str(error.value)


def test_it_is_a_mapping_of_layers_in_the_order_of_their_calls(trace):
    assert trace.layers == tuple(trace) == tuple(trace.keys()) == ("zulu/gru", "lstm#0", "lstm#1")
    assert len(trace) == 3
    assert all(isinstance(layer, TracedLayer) for layer in trace.values())
    assert "lstm#0" in trace
    assert "lstm" not in trace
    assert isinstance(trace.tree, xr.DataTree)


def test_variables_are_attributes_and_items(trace):
    layer = trace["lstm#0"]
    assert isinstance(layer.hidden_grad, xr.DataArray)
    assert layer.hidden_grad.identical(layer["hidden_grad"])
    assert layer.hidden.name == "hidden"
    assert "hidden" in layer
    assert "gate_grad" not in layer
    assert {"hidden", "hidden_grad", "dataset"} <= set(dir(layer))
    assert trace.dataset("lstm#0").identical(layer.dataset)


def test_data_is_not_copied():
    dataset = lstm_dataset()
    trace = Trace({"lstm": dataset})
    assert np.shares_memory(trace["lstm"].hidden.values, dataset["hidden"].values)


def test_a_layer_called_twice_must_be_named_with_its_call(trace):
    with pytest.raises(LayerNotFoundError) as caught:
        trace["lstm"]
    assert message_of(caught) == (
        "Layer 'lstm' was called more than once.\n  got:      'lstm'\n  expected: one of: 'lstm#0', 'lstm#1'"
    )


def test_a_nested_layer_answers_to_its_short_name(trace):
    assert trace["gru"].name == "zulu/gru"
    assert "gru" in trace


def test_a_short_name_of_two_nested_layers_is_refused():
    trace = Trace({name: gru_dataset(name) for name in ("a/gru", "b/gru")})
    with pytest.raises(LayerNotFoundError) as caught:
        trace["gru"]
    assert message_of(caught) == (
        "Layer 'gru' exists more than once.\n  got:      'gru'\n  expected: one of: 'a/gru', 'b/gru'"
    )


def test_a_name_is_never_a_prefix():
    trace = Trace({"lstm_10": lstm_dataset("lstm_10")})
    with pytest.raises(LayerNotFoundError) as caught:
        trace["lstm_1"]
    assert message_of(caught) == (
        "No layer named 'lstm_1' in this trace.\n  try:      did you mean 'lstm_10'? Known: 'lstm_10'"
    )


def test_a_name_is_never_the_end_of_another():
    for name in ("my_lstm", "outer/my_lstm", "my_lstm#0"):
        assert "lstm" not in Trace({name: lstm_dataset(name)})
        assert "my_lstm" in Trace({name: lstm_dataset(name)})


def test_a_layer_may_hold_layers_of_other_sizes():
    trace = Trace({"outer": lstm_dataset("outer", unit=7), "outer/gru": gru_dataset("outer/gru")})
    assert trace["outer"].hidden.sizes["unit"] == 7
    assert trace["outer/gru"].hidden.sizes["unit"] == 3
    assert "cell" not in trace["outer/gru"]


def missing_message(layer, name):
    with pytest.raises(QuantityNotFoundError) as caught:
        getattr(layer, name)
    return message_of(caught)


def test_what_is_missing_says_why():
    without_loss = Trace({"lstm": lstm_dataset().drop_vars("hidden_grad"), "gru": gru_dataset()})
    assert missing_message(without_loss["lstm"], "hidden_grad") == (
        "'hidden_grad' was not computed for layer 'lstm': no loss was given.\n"
        "  try:      rl.trace(model, x, y, loss=...) or a compiled model"
    )
    assert missing_message(without_loss["gru"], "cell") == (
        "'cell' was not computed for layer 'gru': gru has no cell state.\n"
        f"  expected: one of: {', '.join(without_loss['gru'])}"
    )
    assert missing_message(without_loss["lstm"], "hiden").startswith(
        "No quantity named 'hiden' for layer 'lstm'.\n  try:      did you mean 'hidden'? Known: 'input', 'mask'"
    )
    restricted = Trace({"lstm": lstm_dataset()[["hidden"]]}, loss=1.0, quantities=["hidden"])
    assert missing_message(restricted["lstm"], "gates") == (
        "'gates' was not computed for layer 'lstm': it is not among quantities=.\n"
        "  got:      hidden\n  try:      add 'gates'"
    )
    custom = layer_dataset({"hidden": np.zeros((1, 2, 3))}, info={"name": "rnn", "kind": "RNN", "cell": "MyCell"})
    assert missing_message(Trace({"rnn": custom}, loss=1.0)["rnn"], "gates") == (
        "'gates' was not computed for layer 'rnn': it does not exist for MyCell.\n  expected: one of: hidden"
    )


def test_the_repr_has_a_line_per_layer_and_everything_a_reader_must_know(trace):
    assert repr(trace) == (
        "<rnnlens Trace> 3 layers, 3 samples, 4 time steps, loss nan\n"
        "  zulu/gru   Bidirectional, 3 units, bidirectional\n"
        "  lstm#0     LSTM, 2 units\n"
        "  lstm#1     LSTM, 2 units\n"
        "  values     input (2 of 3), mask, hidden, cell (2 of 3), gates, output (2 of 3)\n"
        "  gradients  hidden_grad (2 of 3), initial_state_grad (2 of 3)\n"
        "  loss       WARNING: the loss is nan; gradients may be NaN or infinite\n"
        "  checks     FAILED zulu/gru: the replayed output differs from the captured one by nan (relative); "
        "rounding explains 1e-05\n"
        "  note       the loss is NaN\n"
        f"  from       keras 3.15.1, jax 0.10.2, float32, rnnlens {__version__}"
    )


def test_the_repr_of_a_sound_trace_is_short():
    checks = [Check("replay", "lstm", 3e-8, 1e-5), Check("weight gradient sum", "lstm", 2e-7, 1e-5)]
    dataset = lstm_dataset(samples=1)[["hidden", "hidden_grad"]]
    assert repr(Trace({"lstm": dataset}, loss=0.25, checks=checks)) == (
        "<rnnlens Trace> 1 layer, 1 sample, 4 time steps, loss 0.25\n"
        "  lstm       LSTM, 2 units\n"
        "  values     hidden\n"
        "  gradients  hidden_grad\n"
        "  checks     2 of 2 passed (lstm weight gradient sum: largest residual 2e-07, rounding explains 1e-05)\n"
        f"  from       rnnlens {__version__}"
    )


def test_the_repr_of_a_layer_lists_its_variables(trace):
    assert repr(trace["gru"]) == (
        "<rnnlens TracedLayer 'zulu/gru'> Bidirectional, 3 units, bidirectional\n"
        "  mask    (sample: 3, time: 4)  mask\n"
        "  hidden  (sample: 3, time: 4, direction: 2, unit: 3)  hidden state\n"
        "  gates   (sample: 3, time: 4, direction: 2, gate: 3, unit: 3)  gate activation"
    )


def test_html_escapes_what_users_name():
    trace = Trace({"<b>": lstm_dataset("<b>")}, notes=["a < b"])
    page = trace._repr_html_()
    assert "&lt;b&gt;" in page
    assert "a &lt; b" in page
    assert "<b>" not in page
    assert "hidden_grad" in page
    assert "&lt;b&gt;" in trace["<b>"]._repr_html_()


def test_a_layer_info_travels_with_the_layer(trace):
    info = trace["lstm#0"].info
    assert info["name"] == "lstm#0"
    assert info["cell"] == "lstm"
    assert info["units"] == 2
    assert info["return_sequences"] is False


def test_copies_and_pickles(trace):
    for copied in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert repr(copied) == repr(trace)
        assert math.isnan(copied.loss)
        assert copied["gru"].hidden.identical(trace["gru"].hidden)


def test_one_unit_is_in_the_singular():
    assert describe_layer(lstm_dataset(unit=1)) == "LSTM, 1 unit"
