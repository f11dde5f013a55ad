"""A deep-learning framework with one model and one loss, in NumPy."""

import numpy as np


class Elman:
    """Elman RNN: h_t = tanh(x_t W + h_{t-1} U + b), y_t = h_t V; (sample, time, feature) to (sample, time, output)."""

    def __init__(self, features, units, outputs, seed=0):
        draw = np.random.default_rng(seed).normal
        shapes = {"W": (features, units), "U": (units, units), "b": (units,), "V": (units, outputs)}
        self.weights = {name: draw(size=shape) / np.sqrt(units) for name, shape in shapes.items()}

    def forward(self, x):
        w, states = self.weights, [np.zeros((len(x), len(self.weights["b"])))]
        for t in range(x.shape[1]):
            states.append(np.tanh(x[:, t] @ w["W"] + states[t] @ w["U"] + w["b"]))
        return np.stack(states[1:], 1) @ w["V"], states

    def backward(self, x, dy):
        """Return the gradients of backpropagation through time by name of the weight, and "x" for the input."""
        w, states = self.weights, self.forward(x)[1]
        grads = {name: np.zeros_like(value) for name, value in {**w, "x": x}.items()}
        dh = np.zeros_like(states[0])
        for t in reversed(range(x.shape[1])):
            grads["V"] += states[t + 1].T @ dy[:, t]
            dz = (dh + dy[:, t] @ w["V"].T) * (1 - states[t + 1] ** 2)
            grads["W"] += x[:, t].T @ dz
            grads["U"] += states[t].T @ dz
            grads["b"] += dz.sum(0)
            grads["x"][:, t], dh = dz @ w["W"].T, dz @ w["U"].T
        return grads


def squared_error(y, output):
    return ((output - y) ** 2).mean()
