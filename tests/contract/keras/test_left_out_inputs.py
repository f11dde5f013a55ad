"""Models among whose inputs is None: refused, and right after what the error says to type."""

import re

import numpy as np
import pytest
from spoken_keras import keras

import rnnlens as rl

pytestmark = pytest.mark.op_by_op

RNG = np.random.default_rng(0)
X, OFFSET, Y = RNG.normal(size=(3, 5, 2)), RNG.normal(size=(3, 1)), RNG.normal(size=(3, 1))


class Optional(keras.Model):
    """Takes a sequence, an offset and a mask, each of the last two only if it is there."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = keras.layers.GRU(3, name="rnn"), keras.layers.Dense(1, name="head")

    def call(self, inputs):
        x, offset, mask = (inputs[name] for name in ("x", "offset", "mask")) if isinstance(inputs, dict) else inputs
        output = self.head(self.rnn(x) if mask is None else self.rnn(x, mask=mask))
        return output if offset is None else output + offset


CASES = {
    "one array": ([X, None, None], X),
    "two arrays": ((X, OFFSET, None), [X, OFFSET]),
    "by name": ({"x": X, "offset": None, "mask": None}, X),
}


@pytest.mark.parametrize("case", CASES)
def test_the_function_of_the_hint_is_a_model_of_the_arrays_alone(case):
    inputs, arrays = CASES[case]
    keras.utils.set_random_seed(0)
    model = Optional()
    expected = np.mean((keras.ops.convert_to_numpy(model(inputs)) - Y) ** 2)
    with pytest.raises(rl.errors.InputError, match="is None") as error:
        rl.trace(model, inputs, Y, loss="mse")
    (typed,) = re.findall(r"filled = (rl\.keras\.model\(.*\), model\))", " ".join(str(error.value).split()))
    filled = eval(typed, {"rl": rl, "model": model})
    trace = rl.trace(filled, arrays, Y, loss="mse")
    assert trace.certificate.state == "passed"
    assert float(trace.loss) == pytest.approx(expected, rel=1e-6)
    name = "input" if arrays is X else "input[x0]"
    by_input = rl.gradients(filled, arrays, Y, loss="mse", wrt=name)
    step = np.zeros_like(X)
    step[1, 2, 0] = 1e-3
    losses = [
        np.mean((keras.ops.convert_to_numpy(model(with_first(inputs, X + sign * step))) - Y) ** 2) for sign in (1, -1)
    ]
    assert float(by_input[1, 2, 0]) == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=0.05, abs=1e-4)
    assert "none" in repr(rl.find_nonfinite(filled, arrays, Y, loss="mse"))


def with_first(inputs, x):
    """Return the inputs with another sequence."""
    return {**inputs, "x": x} if isinstance(inputs, dict) else type(inputs)([x, *inputs[1:]])
