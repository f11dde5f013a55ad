"""Leaves are numeric arrays; all else that is no container is a constant, which is handed on."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import dask
import jax
import numpy as np
import optree
import pytest

import rnnlens as rl
from rnnlens.data import DataBatch
from rnnlens.results.nonfinite import Incident
from rnnlens.typing import leaves_of, map_leaves, named_constants, named_leaves, signature

ARRAY = np.arange(6.0).reshape(2, 3)


class Pair(NamedTuple):
    x: object
    scale: object


@dataclass(frozen=True)
class Record:
    x: object
    scale: object


class OfJax:
    def __init__(self, x, scale):
        self.x, self.scale = x, scale


class OfKeras(OfJax):
    pass


jax.tree_util.register_pytree_node(OfJax, lambda own: ([own.x, own.scale], None), lambda _, parts: OfJax(*parts))
# keras.tree looks its classes up in this namespace.
optree.register_pytree_node(
    OfKeras, lambda own: ([own.x, own.scale], None), lambda _, parts: OfKeras(*parts), namespace="keras"
)


@pytest.mark.parametrize("kind", [Pair, Record, OfJax, OfKeras])
def test_containers_are_rebuilt_in_their_own_class(kind):
    tree = kind(ARRAY, 0.5)
    mapped = map_leaves(lambda leaf: leaf + 1, tree)
    assert type(mapped) is kind
    assert mapped.scale == 0.5
    np.testing.assert_array_equal(mapped.x, ARRAY + 1)
    np.testing.assert_array_equal(tree.x, ARRAY)
    assert len(leaves_of(tree)) == 1


def test_an_ordered_dict_stays_one():
    mapped = map_leaves(lambda leaf: leaf + 1, OrderedDict(b=ARRAY, a=2))
    assert list(mapped) == ["b", "a"]
    assert mapped["a"] == 2


def test_a_batch_stays_one():
    mapped = map_leaves(lambda leaf: leaf + 1, DataBatch(ARRAY, {"b": ARRAY, "a": None}))
    assert type(mapped) is DataBatch
    np.testing.assert_array_equal(mapped.x, ARRAY + 1)
    np.testing.assert_array_equal(mapped.y["b"], ARRAY + 1)
    assert mapped.y["a"] is None


THING = SimpleNamespace()
TREE = {"x": ARRAY, "rest": (0.5, np.float32(2), "text", None, [3, 4], THING, int, np.array(["a"]), np.array(1.0))}


def test_leaves_and_constants_have_names():
    assert named_leaves(TREE) == ("x", "rest.8")
    assert list(named_constants(TREE)) == [f"rest.{name}" for name in ("0", "1", "2", "4.0", "4.1", "5", "6", "7")]
    mapped = map_leaves(lambda leaf: leaf + 1, TREE)
    assert mapped["rest"][8] == 2.0
    assert all(mapped["rest"][i] is TREE["rest"][i] for i in (0, 1, 2, 3, 5, 6, 7))


def test_an_object_whose_every_attribute_is_lazy_is_a_leaf():
    delayed = dask.delayed(ARRAY)
    (leaf,) = leaves_of(delayed)
    assert leaf is delayed


def test_a_signature_has_all_that_an_answer_depends_on_but_values():
    assert signature({"x": ARRAY, "n": 3}) == signature({"x": ARRAY + 1, "n": 3})
    others = ({"x": ARRAY, "n": 4}, {"z": ARRAY, "n": 3}, {"x": ARRAY.astype("f4"), "n": 3}, {"x": ARRAY.T, "n": 3})
    assert all(signature(other) != signature({"x": ARRAY, "n": 3}) for other in others)
    assert signature({"x": ARRAY, "n": THING}) is None


def test_an_incident_keeps_the_constants_of_its_batch(tmp_path):
    x = {"sequence": ARRAY, "rest": (0.5, "text", None, [3, 4], THING)}
    Incident.of({"x": x, "y": None, "sample_weight": None}, {}, {"step": 1, "epoch": 0}).save(tmp_path / "incident.nc")
    restored = rl.open(tmp_path / "incident.nc").x
    np.testing.assert_array_equal(restored["sequence"], ARRAY)
    assert restored["rest"] == (0.5, "text", None, [3, 4], repr(THING))
