"""The graph of ``tf1_conv_gru`` in NumPy, and its derivatives by the complex step (Squire, Trapp 1998).

The reference for rnnlens: no autodiff, no TensorFlow, exact to the last digits of float64.
"""

import numpy as np

STEP = 1e-30


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def forward(w, x, h0, labels=None, bump=None):
    """Return output, all states and the loss of each sample; ``bump`` maps steps to arrays added to the state."""
    mask = np.sign(np.abs(x.real).max(axis=2))
    lengths = mask.sum(axis=1).astype(int)
    kernel, steps = w["layer_cell/conv1d/kernel"], x.shape[1]
    padded = np.pad(x, ((0, 0), (2, 2), (0, 0)))
    z = sum(padded[:, i : i + steps] @ kernel[i] for i in range(5)) + w["layer_cell/conv1d/bias"]
    norm = "layer_cell/batch_normalization/"
    z = (z - w[norm + "moving_mean"]) / np.sqrt(w[norm + "moving_variance"] + 1e-3)
    z = z * w[norm + "gamma"] + w[norm + "beta"]
    z = np.where(z.real > 0, z, 0)
    cell, h, states, outputs = "lstm_model/rnn/gru_cell/", h0.astype(z.dtype), [], []
    for t in range(steps):
        gates = np.concatenate([z[:, t], h], 1) @ w[cell + "gates/kernel"] + w[cell + "gates/bias"]
        r, u = np.split(sigmoid(gates), 2, axis=1)
        inner = np.concatenate([z[:, t], r * h], 1) @ w[cell + "candidate/kernel"] + w[cell + "candidate/bias"]
        new_h = u * h + (1 - u) * np.tanh(inner)
        is_real = (t < lengths)[:, None]
        new_h = np.where(is_real, new_h, h)
        if bump is not None:
            new_h = new_h + bump.get(t, 0)
        outputs.append(np.where(is_real, new_h, 0))
        h = new_h
        states.append(h)
    out = (np.stack(outputs, 1) @ w["output/dense/kernel"] + w["output/dense/bias"]) * mask[:, :, None]
    losses = None if labels is None else ((out - labels) ** 2).sum((1, 2)) / labels.size
    return out, np.stack(states, 1), losses


def derivative(function, values, name, direction):
    """Return the derivative of ``function(values)`` along a direction of the named value."""
    perturbed = {**values, name: values[name] + 1j * STEP * direction}
    return np.imag(function(perturbed)) / STEP


def hidden_grad(w, x, h0, labels):
    """Return dL/dh_t, (sample, time, unit), by perturbing every unit of every step."""
    samples, steps, units = *x.shape[:2], h0.shape[1]
    grads = np.zeros((samples, steps, units))
    for t in range(steps):
        for k in range(units):
            bump = np.zeros((samples, units), complex)
            bump[:, k] = 1j * STEP
            grads[:, t, k] = forward(w, x, h0, labels, {t: bump})[2].imag / STEP
    return grads
