"""Single flipped bits, anywhere in a saved result: nothing is silently different, and the interpreter lives."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import flips

sys.path.pop(0)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # the child reads a file and ends
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_flips(suffix):
    found = flips.main(suffix, 25, seed=1, unsealed=False)
    assert sum(found.values()) == 25
    assert set(found) <= {"refused", "as saved"}
    assert found["refused"] > 12


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_many_flips(suffix):
    found = sum((flips.main(suffix, 500, seed=seed, unsealed=False) for seed in (2, 3)), Counter())
    print(suffix, found)
    assert set(found) <= {"refused", "as saved"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_flips_in_what_another_program_wrote(suffix):
    """Without a checksum other numbers cannot be told, and HDF5 may take the process down; nothing else happens."""
    found = flips.main(suffix, 100, seed=7, unsealed=True)
    print(suffix, found)
    assert not {"an error not ours", "hung"} & set(found)
    assert found["refused"] > 10
