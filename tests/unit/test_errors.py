"""Errors print their message, got, expected and hint, and keep this text when pickled."""

import inspect
import pickle

import pytest

from rnnlens import errors

CLASSES = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.RnnlensError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_is_formatted_like_a_message(kind):
    error = kind("Batch is empty.", got="x of shape (0, 5)", expected="at least 1 sample", hint="x[:1]")
    expected = "Batch is empty.\n  got:      x of shape (0, 5)\n  expected: at least 1 sample\n  try:      x[:1]"
    assert str(error) == expected
    assert isinstance(error, errors.RnnlensError)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_pickle_keeps_the_whole_text(kind):
    error = kind("a" * 1500, got="b" * 1500, hint="c" * 3000)
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is kind
    assert str(restored) == str(error)
    assert len(str(restored)) > 5000


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_makes_an_empty_error_as_tblib_does_for_errors_of_other_processes(kind):
    assert type(kind.__new__(kind, "text")) is kind


def test_the_parts_of_a_message_are_attributes_also_after_a_pickle():
    error = errors.InputError("Batch is empty.", got=[0, 5], expected="at least 1 sample", hint="pass x")
    assert str(error).startswith("Batch is empty.\n")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.problem, one.got, one.expected, one.hint) == (
            "Batch is empty.", "[0, 5]", "at least 1 sample", "pass x",
        )  # fmt: skip


def test_an_error_of_user_code_keeps_its_own_attributes():
    class RefusedError(Exception):
        def __init__(self, text):
            super().__init__(text)
            self.hint = "mine"

    with pytest.raises(RefusedError) as raised, errors.raised_by("Your loss"):
        raise RefusedError("no")
    assert raised.value.hint == "mine"
    assert raised.value.problem == "Your loss raised RefusedError."
