import itertools

import numpy as np
import pytest

from rnnlens import __version__
from rnnlens.adapters.protocol import LayerInfo
from rnnlens.errors import InputError
from rnnlens.recurrence.cells import kinds
from rnnlens.results.schema import SCHEMA_VERSION, labelled_array, layer_dataset, proposals_of, quantity
from rnnlens.vocabulary import QUANTITIES

SIZES = {"sample": 2, "time": 3, "feature": 4, "unit": 5, "unit_in": 5, "state": 2}
INFO = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "direction": "forward"}


def shape(dims, cell="lstm"):
    sizes = {**SIZES, "gate": len(kinds()[cell].gates), "state": len(kinds()[cell].states), "direction": 2}
    return tuple(sizes[dim] for dim in dims)


@pytest.mark.parametrize("cell", ["simple_rnn", "lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_quantity_gets_its_dimensions_its_words_and_its_names(cell, bidirectional):
    arrays, expected = {}, {}
    for name, entry in QUANTITIES.items():
        dims = entry.dims
        # Only whole-sequence layers have these, and they have no gates; gradients by lag are a coordinate.
        if dims == QUANTITIES["state"].dims or name == "lag_gradient":
            continue
        if bidirectional and name not in ("input", "mask"):
            axis = 2 if "time" in dims else 1
            dims = (*dims[:axis], "direction", *dims[axis:])
        arrays[name], expected[name] = np.zeros(shape(dims, cell)), dims
    dataset = layer_dataset(arrays, info={**INFO, "cell": cell}, provenance={"a": "b"}, bidirectional=bidirectional)
    for name, variable in dataset.data_vars.items():
        assert variable.dims == expected[name]
        entry = QUANTITIES[name]
        assert variable.attrs["long_name"] == entry.long_name
        assert variable.attrs["units"] == entry.units
        assert variable.attrs["definition"] == entry.definition
        assert variable.attrs.get("source", "") == entry.source
        assert variable.attrs["layer"] == "lstm"
        assert variable.attrs["schema"] == SCHEMA_VERSION
        assert variable.attrs["provenance"] == f"a: b; rnnlens: {__version__}"
    assert tuple(dataset["gate"].values) == kinds()[cell].gates
    assert tuple(dataset["state"].values) == kinds()[cell].states
    assert list(dataset["time"].values) == [0, 1, 2]
    assert ("direction" in dataset.dims) == bidirectional
    if bidirectional:
        assert list(dataset["direction"].values) == ["forward", "backward"]
    for dim in dataset.dims:
        assert dataset[dim].attrs["long_name"]


@pytest.mark.parametrize(
    ("cell", "keeping"), [("lstm", "forget"), ("gru", "update"), ("min_lstm", None), ("simple_rnn", None)]
)
def test_gates_name_the_one_that_keeps_the_state_and_the_proposals(cell, keeping):
    gates = np.zeros((2, 3, len(kinds()[cell].gates), 5))
    dataset = layer_dataset({"gates": gates}, info={**INFO, "cell": cell})
    assert dataset["gates"].attrs.get("keeping") == keeping
    assert proposals_of(dataset["gates"]) == [gate for gate in kinds()[cell].gates if gate in kinds()[cell].proposals]
    assert proposals_of(dataset["gates"]) == ["candidate"]


def test_arrays_are_not_copied():
    arrays = {"hidden": np.zeros((2, 3, 5)), "mask": np.ones((2, 3), bool), "gates": np.zeros((2, 3, 4, 5))}
    dataset = layer_dataset(arrays, info=INFO)
    for name, array in arrays.items():
        assert np.shares_memory(dataset[name].values, array)


@pytest.mark.parametrize(
    ("array_shape", "bidirectional", "dims"),
    [
        ((2, 5), False, ("sample", "unit")),
        ((2, 2, 5), True, ("sample", "direction", "unit")),
        ((2, 3, 5), False, ("sample", "time", "unit")),
        ((2, 3, 2, 5), True, ("sample", "time", "direction", "unit")),
        ((2,), False, ("sample",)),
        ((2, 7, 8, 5), False, ("sample", "axis_1", "axis_2", "unit")),
    ],
)
def test_an_output_may_lack_time_or_be_of_any_rank(array_shape, bidirectional, dims):
    arrays = {"output": np.zeros(array_shape), "output_grad": np.zeros(array_shape)}
    dataset = layer_dataset(arrays, info=INFO, bidirectional=bidirectional)
    assert dataset["output"].dims == dataset["output_grad"].dims == dims


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("kernel", ("feature", "gate", "unit")),
        ("recurrent_kernel", ("unit_in", "gate", "unit")),
        ("bias", ("gate", "unit")),
        ("recurrent_bias", ("gate", "unit")),
    ],
)
@pytest.mark.parametrize(("gradient", "by_time", "bidirectional"), list(itertools.product([False, True], repeat=3)))
def test_weights_by_gate_with_and_without_time_and_direction(name, dims, gradient, by_time, bidirectional):
    expected = (*(("time",) if by_time else ()), *(("direction",) if bidirectional else ()), *dims)
    weight_name = f"{name}_grad" if gradient else name
    dataset = layer_dataset({weight_name: np.zeros(shape(expected))}, info=INFO, bidirectional=bidirectional)
    assert dataset[weight_name].dims == expected


def test_states_of_unequal_size_have_unit_dimensions_of_their_own():
    arrays = {
        "hidden": np.zeros((2, 3, 5)),
        "hidden_grad": np.zeros((2, 3, 5)),
        "cell": np.zeros((2, 3, 7)),
        "cell_grad": np.zeros((2, 3, 7)),
        "gates": np.zeros((2, 3, 4, 7)),
        "gate_grad": np.zeros((2, 3, 4, 7)),
        "gate_preactivation": np.zeros((2, 3, 4, 7)),
        "output": np.zeros((2, 3, 5)),
        "initial_hidden_grad": np.zeros((2, 5)),
        "initial_cell_grad": np.zeros((2, 7)),
        "state_2": np.zeros((2, 3, 1)),
    }
    dataset = layer_dataset(arrays, info=INFO)
    assert dataset.sizes["unit"] == 5
    assert dataset.sizes["cell_unit"] == 7
    assert dataset.sizes["state_2_unit"] == 1
    assert dataset["initial_hidden_grad"].dims == ("sample", "unit")
    for name in ("cell", "cell_grad", "gates", "gate_grad", "gate_preactivation", "initial_cell_grad"):
        assert dataset[name].dims[-1] == "cell_unit"


def test_initial_states_are_told_in_words():
    assert quantity("initial_cell_grad").definition == "dL/dcell_0"
    assert quantity("final_state_1").long_name == "final state 1"


def test_a_layer_info_serves_as_well_as_a_mapping():
    info = LayerInfo("rnn", "RNN", "MyCell", 5, "bidirectional", True, options={"merge_mode": "sum"})
    dataset = layer_dataset({"hidden": np.zeros((2, 3, 2, 5)), "gates": None}, info=info)
    assert dataset.attrs["layer"] == "rnn"
    assert dataset.attrs["direction"] == "bidirectional"
    assert '"merge_mode": "sum"' in dataset.attrs["details"]
    assert list(dataset.data_vars) == ["hidden"]


def test_bfloat16_becomes_float32_and_says_so():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([[[1.5, -2.0]]], dtype=ml_dtypes.bfloat16)
    hidden = layer_dataset({"hidden": values}, info=INFO)["hidden"]
    assert hidden.dtype == np.float32
    assert hidden.attrs["computed_dtype"] == "bfloat16"
    np.testing.assert_array_equal(hidden.values, [[[1.5, -2.0]]])


def test_a_rank_that_fits_nothing_is_refused():
    with pytest.raises(InputError) as caught:
        layer_dataset({"hidden": np.zeros((2, 3))}, info=INFO)
    assert str(caught.value) == (
        "'hidden' has a wrong number of axes.\n  got:      shape (2, 3)\n  expected: (sample, time, unit)"
    )


def test_an_array_without_a_layer_gets_words_and_chosen_coordinates():
    array = labelled_array(
        np.zeros((2, 3, 1, 4)),
        ("sample", "out_time", "out_unit", "in_time"),
        name="jacobian",
        attrs={"long_name": "time Jacobian", "units": "1"},
        coords={"out_time": [10, 20, 50]},
        provenance={"framework": "torch"},
    )
    assert list(array["out_time"].values) == [10, 20, 50]
    assert array["out_time"].attrs["long_name"] == "output time step"
    assert array.attrs["provenance"] == f"framework: torch; rnnlens: {__version__}"
    assert list(array["in_time"].values) == [0, 1, 2, 3]
