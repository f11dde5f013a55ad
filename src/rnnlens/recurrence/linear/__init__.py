"""A recurrence as a linear time-varying system around its trajectory: delta s_t = A_t delta s_{t-1} + B_t delta x_t.

A sweep calls a :class:`LinearStep` for the products with A_t and B_t. Only the step depends on the structure of A_t,
and only a dense step stores A_t as a matrix:

========================== ============================================== ================ ====================
made by                    A_t                                            numbers per step recurrences
========================== ============================================== ================ ====================
:class:`ProductSteps`      dense, or gated: two dense blocks and diagonals S^2              RNN, GRU; LSTM
:func:`dense`              given matrices                                 S^2              any
:func:`diagonal`           diag(a)                                        S                minGRU, IndRNN, Mamba
:func:`complex_diagonal`   diag(a), a complex                             2 S              LRU, S4D
:func:`per_head`           one number for all states of a head            heads            Mamba-2, RetNet
:func:`minus_rank_one`     (diag(a) - u v^T) of each head, for all values heads * keys     delta rules
========================== ============================================== ================ ====================

:func:`with_output` extends any of these by an output that is not a state, y_t = C s_t + D x_t.
"""

from .inputs import Inputs, Kernels, Matrices
from .steps import Dense, Gated, LinearStep, Pattern, ProductSteps, ProductSystem, System, state_columns, walk
from .systems import StructuredSystem, complex_diagonal, dense, diagonal, minus_rank_one, per_head, with_output

__all__ = [
    "Dense",
    "Gated",
    "Inputs",
    "Kernels",
    "LinearStep",
    "Matrices",
    "Pattern",
    "ProductSteps",
    "ProductSystem",
    "StructuredSystem",
    "System",
    "complex_diagonal",
    "dense",
    "diagonal",
    "minus_rank_one",
    "per_head",
    "state_columns",
    "walk",
    "with_output",
]
