"""The convolutional LSTM: an LSTM with convolutions over spatial axes in place of matrix products.

    z = W * x_t + U * h_{t-1} + b,  (i, f, o) = rec_act(z_i, z_f, z_o),  g = act(z_g)
    c_t = f c_{t-1} + i g,          h_t = o act(c_t)

Shi et al. 2015, arXiv:1506.04214, eq. 3, without peepholes, as in Keras. The convolution of the input has strides,
padding and dilation; the convolution of the state keeps its size.

Channels are last: x (..., *space, n), kernel (*window, n, m), result (..., *space, m), with any axes in front. A
convolution is computed as a sum of matrix products, one per position in the window (Dumoulin, Visin 2016,
arXiv:1603.07285, chapters 2 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NoReturn

from ...errors import UnsupportedError
from ...typing import Array, Namespace
from ...vocabulary import BIAS_BY_CHANNEL, CHANNEL, FEATURE, GATE, SPACE, Quantity
from ..linear import System
from ..trajectory import Adjoint, Gradients, Scale, Trajectory
from . import affine
from .affine import Contraction
from .cell import by_name, flat_gate_grad
from .lstm import LSTM
from .registry import built_in


@dataclass(frozen=True)
class Window:
    """Strides, dilation and padding of a convolution, one number per spatial axis.

    ``padding`` is ``"valid"`` or ``"same"``. ``"same"`` pads with zeros so that the result has size
    ceil(size / stride); an odd zero is added at the end, as in Keras and TensorFlow.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Literal["valid", "same"] = "valid"

    def pads(self, sizes: Sequence[int], window: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many zeros are padded before and after each spatial axis."""
        if self.padding == "valid":
            return [(0, 0)] * len(sizes)
        paddings = []
        for size, width, stride, dilation in zip(sizes, window, self.strides, self.dilation, strict=True):
            missing = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
            paddings.append((missing // 2, missing - missing // 2))
        return paddings

    def positions(
        self, sizes: Sequence[int], window: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Return pairs: a position in the kernel window, and the slice of the padded input that it multiplies."""
        padded = [size + sum(pad) for size, pad in zip(sizes, self.pads(sizes, window), strict=True)]
        axes = list(zip(padded, window, self.strides, self.dilation, strict=True))
        counts = [(size - (width - 1) * dilation - 1) // stride + 1 for size, width, stride, dilation in axes]
        for position in product(*(range(width) for width in window)):
            starts = [offset * dilation for offset, dilation in zip(position, self.dilation, strict=True)]
            stops = [(count - 1) * stride + 1 for count, stride in zip(counts, self.strides, strict=True)]
            ranges = zip(starts, stops, self.strides, strict=True)
            yield position, tuple(slice(start, start + stop, stride) for start, stop, stride in ranges)


def convolve(x: Array, kernel: Array, window: Window, xp: Namespace) -> Array:
    """Convolve x (..., *space, n) with a kernel (*window, n, m)."""
    rank = kernel.ndim - 2
    padded, positions = _pad(x, kernel, window, xp), window.positions(x.shape[-1 - rank : -1], kernel.shape[:rank])
    products = (padded[(..., *window_slice, slice(None))] @ kernel[position] for position, window_slice in positions)
    first_product = next(products)
    return sum(products, start=first_product)


def convolve_back(dz: Array, kernel: Array, sizes: Sequence[int], window: Window, xp: Namespace) -> Array:
    """Pull cotangents dz (..., *space, m) of :func:`convolve` back to its input (..., *sizes, n)."""
    rank, leading_shape = kernel.ndim - 2, tuple(dz.shape[: dz.ndim - kernel.ndim + 1])
    pads = window.pads(sizes, kernel.shape[:rank])
    padded_sizes = [size + sum(pad) for size, pad in zip(sizes, pads, strict=True)]
    padded = xp.zeros(
        (*leading_shape, *padded_sizes, kernel.shape[-2]), dtype=dz.dtype, device=getattr(dz, "device", None)
    )
    for position, window_slice in window.positions(sizes, kernel.shape[:rank]):
        padded[(..., *window_slice, slice(None))] += dz @ kernel[position].T
    interior = [slice(pad_before, pad_before + size) for (pad_before, _), size in zip(pads, sizes, strict=True)]
    return padded[(..., *interior, slice(None))]


def kernel_gradient(x: Array, dz: Array, kernel: Array, window: Window, by_time: bool, xp: Namespace) -> Array:
    """Return the gradient of the kernel in :func:`convolve`, summed over samples, and over time unless ``by_time``.

    x : (sample, time, *space, n); dz : (sample, time, *space, m). The gradient has the kernel's shape, with a leading
    time axis if ``by_time``.
    """
    rank = kernel.ndim - 2
    if by_time:
        steps = range(x.shape[1])
        step_grads = [kernel_gradient(x[:, t : t + 1], dz[:, t : t + 1], kernel, window, False, xp) for t in steps]
        return xp.stack(step_grads)
    padded, flat = _pad(x, kernel, window, xp), xp.reshape(dz, (-1, dz.shape[-1]))
    grad = xp.zeros_like(kernel)
    for position, window_slice in window.positions(x.shape[2:-1], kernel.shape[:rank]):
        grad[position] = xp.reshape(padded[(..., *window_slice, slice(None))], (-1, x.shape[-1])).T @ flat
    return grad


def _pad(x: Array, kernel: Array, window: Window, xp: Namespace) -> Array:
    """Pad the spatial axes of x with zeros."""
    rank = kernel.ndim - 2
    first_axis = x.ndim - 1 - rank
    for axis, pads in enumerate(window.pads(x.shape[first_axis:-1], kernel.shape[:rank]), start=first_axis):
        shape = list(x.shape)
        zeros = [
            xp.zeros((*shape[:axis], n, *shape[axis + 1 :]), dtype=x.dtype, device=getattr(x, "device", None))
            for n in pads
        ]
        x = xp.concat([zeros[0], x, zeros[1]], axis=axis) if any(pads) else x
    return x


def _parameters(rank: int) -> Any:
    """Return the weights of a convolutional LSTM with ``rank`` spatial axes."""
    window = tuple(f"kernel_{axis}" for axis in SPACE[rank])
    return by_name(
        Quantity("kernel", (*window, FEATURE, GATE, CHANNEL), "input kernel", "1", "W_x: convolved with the input"),
        Quantity(
            "recurrent_kernel",
            (*window, "channel_in", GATE, CHANNEL),
            "recurrent kernel",
            "1",
            "W_h: convolved with h_{t-1}",
        ),
        BIAS_BY_CHANNEL,
    )


@dataclass(frozen=True, eq=False)
class _ConvLSTM(LSTM):
    """A convolutional LSTM; gates are (sample, time, *space, gate, channel).

    Attributes
    ----------
    kernel : (*window, feature, gate * channel)
    recurrent_kernel : (*window, channel, gate * channel)
    bias : (gate * channel,) or None
    strides, dilation
        Strides and dilation of the convolution of the input, one number per spatial axis.
    padding : {"valid", "same"}
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    """

    at_once = False

    strides: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: Literal["valid", "same"] = "valid"

    @property
    def units(self) -> int:
        """Number of channels of a state."""
        return int(self.kernel.shape[-1]) // len(self.gates)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Number of channels of h and of c."""
        return self.units, self.units

    @property
    def _input_window(self) -> Window:
        ones = (1,) * len(self.space)
        return Window(self.strides or ones, self.dilation or ones, self.padding)

    @property
    def _state_window(self) -> Window:
        ones = (1,) * len(self.space)
        return Window(ones, ones, "same")

    def _apply_by_gate(
        self, x: Array, kernel: Array, scale: Scale, function: Callable[..., Array], xp: Namespace
    ) -> Array:
        """Apply ``function(x, kernel)`` to all gates at once, or gate by gate if each has its own dropout."""
        if scale is None:
            return function(x, kernel)
        gate_results = [
            function(x * _expand_scale(scale[g], x), self._columns(kernel, g)) for g in range(len(self.gates))
        ]
        return xp.concat(gate_results, axis=-1)

    def _columns(self, array: Array, gate: int) -> Array:
        """Return the block of one gate from an array (..., gate * channel)."""
        return array[..., gate * self.units : (gate + 1) * self.units]

    def project(self, x: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the input side W * x_t + b of all gates: (sample, ..., *space, gate * channel)."""
        window = self._input_window
        z = self._apply_by_gate(
            x, self.kernel, scale, lambda gate_input, kernel: convolve(gate_input, kernel, window, xp), xp
        )
        return z if self.bias is None else z + self.bias

    def from_hidden(self, hidden: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the recurrent side U * h_{t-1} of all gates."""
        window = self._state_window
        return self._apply_by_gate(
            hidden,
            self.recurrent_kernel,
            scale,
            lambda gate_hidden, kernel: convolve(gate_hidden, kernel, window, xp),
            xp,
        )

    def to_hidden(self, dz: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull dL/dz (..., *space, gate * channel) back to h_{t-1}."""
        sizes = tuple(dz.shape[dz.ndim - 1 - len(self.space) : -1])
        return self._pull_convolution(dz, self.recurrent_kernel, sizes, scale, self._state_window, xp)

    def input_gradient(self, x: Array, gate_grad: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull dL/dz back to the input, shaped as ``x``."""
        sizes = tuple(x.shape[x.ndim - 1 - len(self.space) : -1])
        return self._pull_convolution(gate_grad, self.kernel, sizes, scale, self._input_window, xp)

    def _pull_convolution(
        self, dz: Array, kernel: Array, sizes: tuple[int, ...], scale: Scale, window: Window, xp: Namespace
    ) -> Array:
        if scale is None:
            return convolve_back(dz, kernel, sizes, window, xp)
        pulled_gates = []
        for gate in range(len(self.gates)):
            pulled_gate = convolve_back(self._columns(dz, gate), self._columns(kernel, gate), sizes, window, xp)
            pulled_gates.append(pulled_gate * _expand_scale(scale[gate], pulled_gate))
        return sum(pulled_gates[1:], start=pulled_gates[0])

    def input_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the input kernel and of the bias."""
        flat, x = flat_gate_grad(run, result, times), run.input[:, times, ...]
        grads = {
            "kernel": self._kernel_gradient(x, flat, self.kernel, run.input_scale, self._input_window, how, run.xp)
        }
        if self.bias is not None:
            space = tuple(range(2, flat.ndim - 1))
            grads["bias"] = run.xp.sum(flat, axis=(0, *space) if how.by_time else (0, 1, *space))
        return grads

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradient of the recurrent kernel."""
        flat, previous_hidden = flat_gate_grad(run, result, times), run.before(0)[:, times, ...]
        kernel, window = self.recurrent_kernel, self._state_window
        return {
            "recurrent_kernel": self._kernel_gradient(
                previous_hidden, flat, kernel, run.state_scale, window, how, run.xp
            )
        }

    def _kernel_gradient(
        self,
        x: Array,
        dz: Array,
        kernel: Array,
        scale: Scale,
        window: Window,
        contraction: Contraction,
        xp: Namespace,
    ) -> Array:
        if scale is None:
            return kernel_gradient(x, dz, kernel, window, contraction.by_time, xp)
        gate_grads = [
            kernel_gradient(
                x * _expand_scale(scale[g], x),
                self._columns(dz, g),
                self._columns(kernel, g),
                window,
                contraction.by_time,
                xp,
            )
            for g in range(len(self.gates))
        ]
        return xp.concat(gate_grads, axis=-1)

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> None:
        """Return None: the gradient of a convolution kernel is no product of two matrices."""
        return

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with flattened axes of space: a dense A_t of (place * channel)^2 numbers per pair of states."""
        return affine.UnitVectorSystem(self, run)

    def map_at(self, x: Array, xp: Namespace) -> NoReturn:
        """Raise UnsupportedError: the search for fixed points needs states without spatial axes."""
        raise UnsupportedError(
            "rnnlens does not compute fixed points of a ConvLSTM.",
            got="a state with axes of space",
            expected="a layer whose states are (sample, time, unit)",
        )


def _expand_scale(scale: Array, x: Array) -> Array:
    """Insert the axes of ``x`` between sample and space into dropout multipliers (sample, *space, n)."""
    return scale[(slice(None), *[None] * (x.ndim - scale.ndim))]


@built_in
class ConvLSTM1D(_ConvLSTM):
    """A convolutional LSTM with one spatial axis."""

    kind = "conv_lstm_1d"
    space = SPACE[1]
    parameters = _parameters(1)


@built_in
class ConvLSTM2D(_ConvLSTM):
    """A convolutional LSTM with two spatial axes."""

    kind = "conv_lstm_2d"
    space = SPACE[2]
    parameters = _parameters(2)


@built_in
class ConvLSTM3D(_ConvLSTM):
    """A convolutional LSTM with three spatial axes."""

    kind = "conv_lstm_3d"
    space = SPACE[3]
    parameters = _parameters(3)
