import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnnlens.results.encoding import from_path, to_paths

segment = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=6)
name = st.lists(segment, min_size=1, max_size=3).map("/".join)


@given(st.lists(name, unique=True, max_size=5))
def test_every_set_of_names_has_distinct_paths_that_lead_back(names):
    paths = to_paths(names)
    assert [from_path(path) for path in paths.values()] == names
    assert len(set(paths.values())) == len(names)


@pytest.mark.parametrize("name", ["lstm#0", "encoder.rnn[1]", "a/b/c", "50%", "@", "..", "."])
def test_marks_in_names_survive(name):
    assert from_path(to_paths([name])[name]) == name


def test_no_layer_is_the_parent_of_another():
    paths = to_paths(["outer", "outer/inner"])
    assert not paths["outer/inner"].startswith(paths["outer"])
