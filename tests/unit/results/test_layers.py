import pytest

from rnnlens.adapters.protocol import LayerInfo
from rnnlens.errors import LayerNotFoundError
from rnnlens.results.layers import LayerTable


@pytest.fixture
def table():
    options = {"merge_mode": "concat", "dropout": 0.0, "unroll": False}
    return LayerTable(
        [
            LayerInfo("lstm", "LSTM", "lstm", 32, "bidirectional", True, None, options=options),
            LayerInfo("core<1>", "RNN", "MyCell", 8, "forward", False, True),
        ]
    )


def test_it_prints_what_differs_and_nothing_that_is_off(table):
    assert repr(table) == (
        "name     layer  cell    units  direction      returns     masked               options\n"
        "lstm     LSTM           32     bidirectional  every step  depends on the data  merge_mode=concat\n"
        "core<1>  RNN    MyCell  8      forward        last step   yes"
    )


def test_rows_by_position_name_and_slice(table):
    assert len(table) == 2
    assert table[0] is table["lstm"]
    assert [info.name for info in table] == list(table.names) == ["lstm", "core<1>"]
    assert "lstm" in table
    assert "gru" not in table
    assert table[1:].names == ("core<1>",)
    with pytest.raises(LayerNotFoundError, match=r"did you mean 'lstm'\?"):
        table["lstn"]


def test_html_escapes_names(table):
    assert "core&lt;1&gt;" in table._repr_html_()


def test_a_model_without_recurrence():
    assert repr(LayerTable([])) == "no recurrent layers"
    assert LayerTable([]).rows() == []
