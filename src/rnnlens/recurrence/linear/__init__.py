"""A recurrence as a linear time-varying system around its trajectory: delta s_t = A_t delta s_{t-1} + B_t delta x_t.

A sweep calls a :class:`LinearStep` for the products with A_t and B_t. Only the step depends on the structure of A_t,
and only a dense step stores A_t as a matrix:

======================== ============================================== ================ =====================
made by                  A_t                                            numbers per step recurrences
======================== ============================================== ================ =====================
:class:`ProductSteps`    dense, or gated: two dense blocks and diagonals S^2              RNN, GRU; LSTM
:func:`diagonal`         diag(a)                                        S                minGRU, minLSTM, IndRNN
:class:`ComplexDiagonal` diag(a), a complex                             2 S              LRU
======================== ============================================== ================ =====================
"""

from .steps import Dense, Gated, LinearStep, Pattern, ProductSteps, ProductSystem, System, state_columns, walk
from .structured import ComplexDiagonal, Kernels, StructuredSystem, diagonal

__all__ = [
    "ComplexDiagonal",
    "Dense",
    "Gated",
    "Kernels",
    "LinearStep",
    "Pattern",
    "ProductSteps",
    "ProductSystem",
    "StructuredSystem",
    "System",
    "diagonal",
    "state_columns",
    "walk",
]
