"""``rl.torch.cuts`` on the training steps of well-known programs: lines, and price against one uncut loop."""

from __future__ import annotations

import linecache

import numpy as np
import pytest
from training_steps import PROGRAMS

import rnnlens as rl


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cuts_of_a_program_have_their_lines_and_their_price(name):
    make, is_cut, lines = PROGRAMS[name]
    program = make()
    full, used = program.gradients_by_hand(), program.gradients_by_hand(is_cut)
    found = rl.torch.cuts(program.step, program.model, keep=program.keep)
    assert len(found.cuts) == lines
    assert all("# cut" in linecache.getline(cut.file, cut.line) for cut in found.cuts)
    norms = np.linalg.norm(used), np.linalg.norm(full)
    assert norms[0] != pytest.approx(norms[1], rel=1e-4)
    assert found.price.norm_ratio == pytest.approx(norms[0] / norms[1], rel=1e-10)
    assert found.price.cosine == pytest.approx(used @ full / norms[0] / norms[1], rel=1e-10)
    assert any(cut.behind for cut in found.cuts) == ("what another cut ends" in str(found)) == (lines > 1)


def test_a_target_without_gradient_is_listed_unless_it_is_kept():
    program = PROGRAMS["frozen target"][0]()
    found = rl.torch.cuts(program.step, program.model)
    assert any(cut.code.startswith("target = ") for cut in found.cuts)
    kept = rl.torch.cuts(program.step, program.model, keep="target = ")
    assert len(kept.cuts) == len(found.cuts) - 1
