"""The two other ways in which a GRU's weights are kept, for ``rl.cells.register(..., weights=...)``.

The equations are those of :class:`GRU`: of TensorFlow 1 with the reset gate before the recurrent product
(``reset_after=False``), of torch with the reset gate after it (``reset_after=True``). Both functions take the weights,
or their gradients, by the names that the framework has, and are linear in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import array_namespace

from ...typing import Array


def gru_tensorflow1(
    units: int, *, gates: str = "gates", candidate: str = "candidate"
) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    """Of ``tf.compat.v1.nn.rnn_cell.GRUCell``: (r, u) in one matrix on [x, h], the candidate in another on [x, r h].

    Cho et al. 2014, arXiv:1406.1078v3, eqs. 5-8; h_t = u h_{t-1} + (1 - u) n.

    Parameters
    ----------
    units
        Size of the state.
    gates, candidate
        What comes before ``/kernel`` and ``/bias`` in the names of the weights; a dot does as well.
    """

    def layout(named: Mapping[str, Array]) -> dict[str, Array]:
        def of(part: str, what: str) -> Any:
            return next(named[f"{part}{sep}{what}"] for sep in "/._" if f"{part}{sep}{what}" in named)

        two, one, bias = of(gates, "kernel"), of(candidate, "kernel"), of(gates, "bias")
        xp, features = array_namespace(two), two.shape[0] - units
        whole = xp.concat([two[:, units:], two[:, :units], one], axis=-1)
        biases = xp.concat([bias[units:], bias[:units], of(candidate, "bias")], axis=-1)
        return {"kernel": whole[:features], "recurrent_kernel": whole[features:], "bias": biases}

    return layout


def gru_torch(named: Mapping[str, Array]) -> dict[str, Array]:
    """Of a module that keeps weight_ih, weight_hh, bias_ih, bias_hh as ``torch.nn.GRUCell``: (r, z, n), transposed."""

    def ordered(array: Any) -> Array:
        xp, size = array_namespace(array), array.shape[0] // 3
        reset, update, candidate = (array[k * size : (k + 1) * size] for k in range(3))
        return xp.concat([update, reset, candidate], axis=0)

    names = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel", "bias_ih": "bias", "bias_hh": "recurrent_bias"}
    found = {ours: ordered(named[theirs]) for theirs, ours in names.items() if theirs in named}
    return {name: array.T if len(array.shape) == 2 else array for name, array in found.items()}
