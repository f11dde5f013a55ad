"""Checks of the arguments of public functions: one table per function, applied before the function runs.

>>> @checked(times=integer(least=1), loud=switch)
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
    as_list,
    as_name,
    axes_by_name,
    callable_value,
    checked,
    class_weights,
    either,
    integer,
    kept_steps,
    loss,
    memory,
    names,
    number,
    one_of,
    path,
    refuse_without_order,
    seed,
    seed_or_none,
    shares,
    switch,
    text,
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

#: Checks of the arguments that say how a model is run and differentiated, for the tables of several verbs.
RUN: dict[str, Check] = {
    "loss": loss,
    "sample_weight": chunked(weights_of_samples),
    "class_weight": class_weights,
    "training": switch,
    "seed": seed_or_none,
}

__all__ = [
    "RUN",
    "Check",
    "anything",
    "as_list",
    "as_name",
    "as_numbers",
    "as_numpy",
    "axes_by_name",
    "callable_value",
    "checked",
    "chunked",
    "class_weights",
    "data_set",
    "either",
    "examples",
    "finite_states",
    "in_memory",
    "integer",
    "is_lazy",
    "kept_steps",
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
    "shares",
    "states",
    "switch",
    "text",
    "weights_of_samples",
]
