"""A synthetic training run with known profiles, of the type that ``rl.open`` returns; the title of a figure."""

import numpy as np
import xarray as xr

from rnnlens.results.training_run import TrainingRun

STEPS = np.array([0, 50, 100, 150, 200])


def make_run(layers=("lstm", "gru"), steps=STEPS, times=12, names=None, directions=0):
    """Return a run whose profile at record r and time t is 10 ** -(times - 1 - t) * (r + 1), so largest at the end."""
    steps = np.asarray(steps)
    shape = 10.0 ** -np.arange(times)[::-1]
    values = (np.arange(len(steps)) + 1.0)[:, None] * shape[None, :]
    coords = {"step": steps, "time": np.arange(times), "epoch": ("step", np.zeros(len(steps), int))}
    dims = ("step", "time")
    if directions:
        values, dims = np.stack([values, values[:, ::-1]], axis=-1), ("step", "time", "direction")
        coords |= {"direction": ["forward", "backward"]}
    attrs = {"long_name": "total gradient of the hidden state by step", "units": "loss", "definition": "made up"}
    profile = xr.DataArray(values, dims=dims, coords=coords, attrs=attrs)
    names = names or {"loss": 1.0 / (1 + np.arange(len(steps)))}
    scalars = xr.Dataset(
        {name: ("step", np.asarray(v, dtype=float)) for name, v in names.items()},
        {"step": steps, "epoch": ("step", np.zeros(len(steps), int)), "written": ("step", np.arange(len(steps)) * 1.0)},
    )
    return TrainingRun({name: xr.Dataset({"adjoint_profile": profile}) for name in layers}, scalars)


def suptitle(axes):
    """Return the title of a figure and the notes below it, in one line."""
    figure = axes[0].get_figure(root=True)
    notes = [text.get_text() for text in figure.artists if text.get_gid() == "note"]
    return " ".join(" ".join([figure.get_suptitle(), *notes]).split())
