"""Single flipped bits in a saved result: no number changes silently, and the interpreter does not crash."""

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
    outcomes = flips.main(suffix, 25, seed=1, unsealed=False)
    assert sum(outcomes.values()) == 25
    assert set(outcomes) <= {"refused", "as saved"}
    assert outcomes["refused"] > 12


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_many_flips(suffix):
    outcomes = sum((flips.main(suffix, 500, seed=seed, unsealed=False) for seed in (2, 3)), Counter())
    print(suffix, outcomes)
    assert set(outcomes) <= {"refused", "as saved"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_flips_in_what_another_program_wrote(suffix):
    """Without a checksum changed numbers go unnoticed and HDF5 may crash; other errors are rnnlens', nothing hangs."""
    outcomes = flips.main(suffix, 100, seed=7, unsealed=True)
    print(suffix, outcomes)
    assert not {"an error not ours", "hung"} & set(outcomes)
    assert outcomes["refused"] > 10
