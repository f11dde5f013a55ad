"""Adapter of rnnlens for tiny. Derivatives are exact, by the complex step (Squire, Trapp 1998)."""

from types import MappingProxyType

import numpy as np
from tiny import Elman, squared_error

from rnnlens.adapters import protocol
from rnnlens.adapters.protocol import Adapter, LayerWeights, Port, ReferenceRun
from rnnlens.recurrence.cells import SimpleRNN

STEP = 1e-30
KEYS = {"W": ("rnn", "kernel"), "U": ("rnn", "recurrent_kernel"), "b": ("rnn", "bias"), "V": ("head", "kernel")}
WEIGHTS = {Port("weight", layer, key=key): name for name, (layer, key) in KEYS.items()}


def loss_of(model, batch):
    loss = batch.loss or squared_error
    return loss if batch.y is None else lambda output: loss(np.asarray(batch.y), output)


def steps(shape):
    """Return one imaginary step (entry, *shape) for each entry of an array."""
    return 1j * STEP * np.eye(int(np.prod(shape))).reshape(-1, *shape)


class TinyRun(protocol.RunByPorts):
    def tensors(self, perturbed_port=None, step=0.0):
        """Return values at every port, with ``step`` added at one; cut ports pass on no imaginary part."""
        model, batch, values = self.model, self.batch, {}

        def tap(port, value):
            values[port] = (value.real if port in self.taps.cut else value) + (step if port == perturbed_port else 0.0)
            return values[port]

        w = {name: tap(port, model.weights[name]) for port, name in WEIGHTS.items()}
        x = tap(Port("input", "rnn"), tap(Port("input"), np.asarray(batch.x)))
        start = np.asarray(batch.initial_state["rnn"][0]) if batch.initial_state else np.zeros((len(x), len(w["b"])))
        states = [tap(Port("initial_state", "rnn"), start)]
        for t in range(x.shape[1]):
            states.append(np.tanh(x[:, t] @ w["W"] + states[t] @ w["U"] + w["b"]))
        hidden = tap(Port("input", "head"), tap(Port("output", "rnn"), np.stack(states[1:], 1)))
        output = tap(Port("output"), tap(Port("output", "head"), hidden @ w["V"]))
        if batch.y is not None or batch.loss is not None:
            tap(Port("loss"), np.asarray(loss_of(model, batch)(output)))
        return values

    def pull(self, cotangents):
        rows = np.concatenate([np.reshape(c, (len(c), -1)) for c in cotangents.values()], axis=1)
        return {port: self.pulled(port, cotangents, rows) for port in self.taps.wrt}

    def pulled(self, port, targets, rows):
        shape = self.values[port].shape
        runs = [self.tensors(port, step) for step in steps(shape)]
        slopes = [np.concatenate([values[target].imag.ravel() / STEP for target in targets]) for values in runs]
        grads = (rows @ np.stack(slopes, axis=1)).reshape(-1, *shape)
        return grads if grads.any() else None

    def reference(self, cotangents=None):
        model, batch = self.model, self.batch
        output = model.forward(batch.x)[0]
        value = None if batch.y is None and batch.loss is None else float(loss_of(model, batch)(output))
        if not self.taps.gradients:
            return ReferenceRun([output], value)
        dy = cotangents or (lambda outputs: self.adapter.loss_of(model, batch, protocol.Outputs(outputs, None))[1])
        grads = model.backward(batch.x, dy([output])[0])
        return ReferenceRun([output], value, [grads.pop("x")], grads)


class TinyFacts(protocol.ModelFacts):
    framework, loss = "tiny", staticmethod(squared_error)
    submodules = MappingProxyType({"rnn": protocol.Submodule(), "head": protocol.Submodule()})

    def weight_location(self, layer, direction, key):
        return protocol.WeightLocation(WEIGHTS[Port("weight", layer, key=key)], lambda gradient: gradient)


class TinyAdapter(Adapter):
    name, facts = "tiny", TinyFacts

    def owns(self, model):
        return isinstance(model, Elman)

    def describe(self, model):
        return [protocol.LayerInfo("rnn", "Elman", "simple_rnn", len(model.weights["b"]), "forward", True, False)]

    def weights(self, model):
        cell = SimpleRNN(*(model.weights[name].copy() for name in "WUb"))
        rnn = LayerWeights(cell.weights(), dict.fromkeys(cell.weights(), True), {"forward": cell})
        return {"rnn": rnn, "head": LayerWeights({"kernel": model.weights["V"].copy()}, {"kernel": True})}

    def run(self, model, batch, taps):
        return TinyRun(self, model, batch, taps)

    def loss_of(self, model, batch, outputs):
        value, pull = self.differentiate(loss_of(model, batch), outputs.leaves, model)
        return float(value), pull(1.0)

    def differentiate(self, function, arrays, model):
        def pull_back(cotangent, i):
            perturbed = [function(*arrays[:i], arrays[i] + step, *arrays[i + 1 :]) for step in steps(arrays[i].shape)]
            return np.reshape([np.sum(cotangent * output.imag / STEP) for output in perturbed], arrays[i].shape)

        return np.asarray(function(*arrays)), lambda cotangent: [pull_back(cotangent, i) for i in range(len(arrays))]

    def reinitialised(self, model, seed):
        return Elman(*model.weights["W"].shape, model.weights["V"].shape[1], seed)


adapter = TinyAdapter()
