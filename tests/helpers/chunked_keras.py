"""Program that compares lazy results of a Keras model with in-memory ones, counts compilations, and prints JSON.

KERAS_BACKEND=jax python tests/helpers/chunked_keras.py keras                  # all calls
KERAS_BACKEND=jax python tests/helpers/chunked_keras.py keras jacobian trace   # these
"""

import importlib
import json
import sys

import dask
import dask.array as da
import numpy as np

import rnnlens as rl

#: COUNT is no multiple of CHUNK: the last chunk has 3 samples.
CHUNK, COUNT, STEPS, FEATURES = 16, 51, 12, 3


def make_model(package):
    keras = importlib.import_module(package)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((STEPS, FEATURES)),
            layers.LSTM(6, return_sequences=True, name="lstm"),
            layers.GRU(4, name="gru"),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile(loss="mse")
    return model


def mean_over_chunks(model, x, y):
    """Return weights and gradients as the mean over chunks, summed in float64 in the order of the chunks."""
    totals = {}
    for start in range(0, COUNT, CHUNK):
        result = rl.weights(model, x[start : start + CHUNK], y[start : start + CHUNK])
        for name, array in arrays(result):
            chunk_sum = array.astype("float64") * min(CHUNK, COUNT - start)
            totals[name] = totals.get(name, 0) + chunk_sum if is_summed(name) else array
    return {name: (array / COUNT).astype("float32") if is_summed(name) else array for name, array in totals.items()}


def is_summed(name):
    return name.endswith("_grad") or name == "loss"


def arrays(result):
    """Yield the name and values of every float array of a result, and of its loss or target value."""
    for name in ("loss", "value"):
        if getattr(result, name, None) is not None and not hasattr(result, "dims"):
            yield name, np.asarray(getattr(result, name))
    if isinstance(result, dict):
        yield from result.items()
    elif hasattr(result, "tensors"):
        for name in result.tensors:
            yield name, np.asarray(result[name].values)
    elif hasattr(result, "layers"):
        for layer in result.layers:
            for name, array in result.dataset(layer).data_vars.items():
                if array.dtype.kind == "f":
                    yield f"{layer}/{name}", np.asarray(array.values)
    else:
        yield "values", np.asarray(result.values)


def largest_differences(actual, expected):
    """Return the largest difference by name, relative to the largest number of the array."""
    pairs = zip(arrays(actual), arrays(expected), strict=True)
    sizes = {name: (np.abs(a - b).max(), np.abs(b).max()) for (name, a), (_, b) in pairs}
    return {
        name: float(difference / largest) if largest else float(difference)
        for name, (difference, largest) in sizes.items()
    }


class Compilations:
    """Counter of JAX compilations and TensorFlow graph traces."""

    def __init__(self):
        self.count = 0
        if "jax" in sys.modules:
            jax = sys.modules["jax"]
            jax.monitoring.register_event_duration_secs_listener(self._count_event)
        if "tensorflow" in sys.modules:
            module = importlib.import_module("tensorflow.python.framework.func_graph")
            trace = module.func_graph_from_py_func

            def counted(*args, **kwargs):
                self.count += 1
                return trace(*args, **kwargs)

            module.func_graph_from_py_func = counted

    def _count_event(self, event, duration, **_):
        self.count += event.endswith("backend_compile_duration")

    def count_during(self, run):
        before = self.count
        run()
        return self.count - before


def main():
    model = make_model(sys.argv[1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, STEPS, FEATURES)).astype("float32")
    y = rng.normal(size=(COUNT, 1)).astype("float32")
    lazy_x, lazy_y = da.from_array(x, chunks=(CHUNK, -1, -1)), da.from_array(y, chunks=(CHUNK, -1))
    batches = {"batch_size": CHUNK}
    calls = {
        "gradients by input": (rl.gradients, (x, y), (lazy_x, lazy_y), {"wrt": "input"}, batches),
        "gradients by weights": (rl.gradients, (x, y), (lazy_x, lazy_y), {}, batches),
        "jacobian": (rl.jacobian, (x,), (lazy_x,), {"measure": "norm"}, {}),
        "weights": (rl.weights, (x, y), (lazy_x, lazy_y), {}, {}),
        "trace": (rl.trace, (x, y), (lazy_x, lazy_y), {}, {}),
    }
    report = {"apart": {}, "compiled": {}}
    compilations = Compilations()
    with dask.config.set(scheduler="synchronous"):
        for name in sys.argv[2:] or calls:
            verb, in_memory, lazy, keywords, options = calls[name]
            result = verb(model, *lazy, **keywords)
            first = compilations.count_during(
                lambda verb=verb, keywords=keywords, lazy=lazy: compute_few_chunks(model, verb, lazy, keywords)
            )
            second = compilations.count_during(result.compute)
            report["compiled"][name] = [first, second]
            expected = (
                mean_over_chunks(model, x, y) if verb is rl.weights else verb(model, *in_memory, **keywords, **options)
            )
            report["apart"][name] = largest_differences(result.compute(), expected)
    print(json.dumps(report))


def compute_few_chunks(model, verb, data, keywords):
    """Compute two full chunks and one of a single sample, after which every function has been compiled."""
    verb(model, *[array[: 2 * CHUNK + 1] for array in data], **keywords).compute()


if __name__ == "__main__":
    main()
