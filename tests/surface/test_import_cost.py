"""Modules are imported at first use only, and a framework never unless the user imported it."""

import json
import subprocess
import sys

import pytest

HEAVY = ("keras", "tensorflow", "torch", "jax", "flax", "matplotlib", "sklearn", "plotly")

SETUP = """
import numpy as np
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace
info = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 4, "direction": "forward"}
trace = Trace({"lstm": layer_dataset({"hidden": np.zeros((2, 3, 4))}, info=info)}, loss=1.0)
"""


def loaded_modules(code, *modules):
    """Return those of the modules that a new process has imported after running the code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {list(modules)!r} if m in sys.modules]))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def test_the_probe_sees_what_is_loaded():
    assert loaded_modules("import xml.dom, json", "xml.dom", "sqlite3") == ["xml.dom"]


def test_importing_loads_none_of_our_rooms():
    assert loaded_modules("import rnnlens", *HEAVY, "xarray", "numpy", "rich", "typer", "rnnlens.results") == []


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_saving_and_opening_needs_no_framework_and_no_figures(tmp_path, suffix):
    path = str(tmp_path / f"run.{suffix}")
    code = (
        f"{SETUP}\nimport rnnlens as rl\ntrace.save({path!r})\nback = rl.open({path!r})\nrepr(back), back._repr_html_()"
    )
    assert loaded_modules(code, *HEAVY, "typer", "rnnlens.verbs") == []


@pytest.mark.full
def test_dask_is_not_imported_by_results_in_memory():
    code = (
        "import numpy as np, torch, rnnlens as rl\n"
        "class Net(torch.nn.LSTM):\n    def forward(self, x): return super().forward(x)[0]\n"
        "net = Net(3, 4, batch_first=True)\n"
        "x = np.ones((2, 5, 3), 'float32')\n"
        "found = rl.jacobian(net, x, measure='norm'), rl.trace(net, x)\n"
        "repr(found), found[1]._repr_html_()\n"
        "import sys\n"
        "assert not {'dask', 'distributed'} & sys.modules.keys()\n"
        "import dask.array as da, xarray as xr\n"
        "assert xr.DataArray(da.ones(4, chunks=2)).chunks == ((2, 2),)"
    )
    assert loaded_modules(code, "dask") == ["dask"]


def test_options_and_the_command_line_help_are_light():
    assert loaded_modules("import rnnlens as rl\nrl.options(memory='1 GiB')", *HEAVY, "xarray", "rich") == []
    code = "from rnnlens.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass"
    assert loaded_modules(code, *HEAVY, "xarray") == []


def test_refusing_an_object_that_is_no_model_loads_no_framework():
    code = "import rnnlens as rl\ntry:\n    rl.layers([1, 2])\nexcept rl.errors.ModelError: pass"
    assert loaded_modules(code, *HEAVY) == []
