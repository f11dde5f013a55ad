"""Checks of the arguments of public functions: one table per function, applied before the function runs.

>>> @checked(times=whole(least=1), loud=switch)
... def greet(*, times=1, loud=False):
...     return "hello " * times
>>> greet(times=0)
Traceback (most recent call last):
    ...
rnnlens.errors.InputError: times= is a whole number.
  got:      0
  expected: a whole number, times >= 1
"""

from .checks import (
    Check,
    anything,
    as_name,
    axes_by_name,
    called,
    checked,
    class_weights,
    either,
    kept_steps,
    listed,
    loss,
    memory,
    names,
    number,
    one_of,
    path,
    refuse_without_order,
    seed,
    seed_or_none,
    switch,
    text,
    whole,
)
from .data import (
    as_numbers,
    as_numpy,
    chunked,
    data_set,
    examples,
    finite_states,
    in_memory,
    is_lazy,
    many_examples,
    one_batch,
    plain_weights,
    refuse_large,
    states,
    weights_of_samples,
)

__all__ = [
    "Check",
    "anything",
    "as_name",
    "as_numbers",
    "as_numpy",
    "axes_by_name",
    "called",
    "checked",
    "chunked",
    "class_weights",
    "data_set",
    "either",
    "examples",
    "finite_states",
    "in_memory",
    "is_lazy",
    "kept_steps",
    "listed",
    "loss",
    "many_examples",
    "memory",
    "names",
    "number",
    "one_batch",
    "one_of",
    "path",
    "plain_weights",
    "refuse_large",
    "refuse_without_order",
    "seed",
    "seed_or_none",
    "states",
    "switch",
    "text",
    "weights_of_samples",
    "whole",
]
