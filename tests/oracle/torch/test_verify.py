"""``rl.verify``: mistakes of public kernels are caught and located, right kernels are not accused."""

from __future__ import annotations

from functools import partial

import pytest
from scan_mutants import RIGHT, diagonal, matrix, rwkv7, selective, without_conjugate

import rnnlens as rl
from rnnlens.adapters.torch.scans import scan
from rnnlens.cli.app import run
from rnnlens.recurrence.sequence import SequenceCell

#: Mistake: recurrence, function, further arguments of verify, tensors that must be named, words of the cause.
MUTANTS = {
    "conjugate": ("complex_diagonal", without_conjugate, {}, {"gradient of a", "gradient of b"}, "complex conjugate"),
    **{
        f"diagonal, {mistake}": ("diagonal", partial(diagonal, mistake=mistake), options, named, cause)
        for mistake, options, named, cause in (
            ("initial detached", {"initial": True}, {"gradient of initial"}, "initial is missing"),
            ("first row only", {}, {"gradient of b"}, "right in 1 of 3 samples"),
            ("last chunk without gradient", {}, {"gradient of b"}, ""),
            ("decay reversed", {}, {"gradient of a"}, "reversed in time"),
            ("negative", {}, {"gradient of b"}, "factor -1"),
            ("truncated", {}, {"gradient of a", "gradient of b"}, "truncated at borders of 8 steps"),
            ("decay detached", {}, {"gradient of a"}, "path through the decay is missing"),
            ("a_t for a_{t+1}", {}, {"gradient of b"}, "a_t in place of a_{t+1}"),
            ("S_t for S_{t-1}", {}, {"gradient of a"}, "decay uses S_t in place of S_{t-1}"),
        )
    },
    **{
        f"delta, {mistake}": ("gated_delta", partial(matrix, mistake=mistake), {}, named, cause)
        for mistake, named, cause in (
            ("decay detached", {"gradient of g"}, "path through the decay"),
            ("scale missing", {"gradient of q"}, "factor 2.828"),
            ("removal detached", {"gradient of k"}, ""),
            ("beta of the write only", {"gradient of beta"}, ""),
            ("last state detached", {"gradient of k", "gradient of v"}, "gradient of the last state is missing"),
            ("read reads S_{t-1}", {"gradient of q"}, "read uses S_{t-1}"),
        )
    },
    "kda, order of the factors": ("kda", partial(matrix, mistake="order"), {}, {"gradient of g", "gradient of k"}, ""),
    "gla, truncated": ("gla", partial(matrix, mistake="truncated"), {}, {"gradient of k"}, "borders of 8 steps"),
    **{
        f"selective, {mistake}": ("selective_scan", partial(selective, mistake=mistake), {}, named, cause)
        for mistake, named, cause in (
            ("A of one sample", {"gradient of A"}, "not summed over samples"),
            ("A averaged", {"gradient of A"}, "factor 0.3333"),
            ("dt of the write detached", {"gradient of dt"}, ""),
            ("dt of the decay detached", {"gradient of dt"}, ""),
        )
    },
    "rwkv7, a detached": ("rwkv7", partial(rwkv7, mistake="a detached"), {}, {"gradient of a"}, "is missing"),
    "rwkv7, state": ("rwkv7", partial(rwkv7, mistake="state of the removal detached"), {}, {"gradient of k"}, ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught_and_located(name):
    recurrence, function, options, named, cause = MUTANTS[name]
    verification = rl.verify(function, recurrence, chunk=8, **options)
    assert not verification.ok
    wrong = {tensor.name: tensor for tensor in verification.wrong}
    assert named <= wrong.keys()
    assert cause in verification.cause
    assert all(tensor.error > tensor.bound for tensor in verification.wrong)
    assert not {"output", "last state"} & wrong.keys()
    assert "WRONG" in str(verification)


def test_more_than_twenty_mistakes_are_kept():
    assert len(MUTANTS) >= 20


def test_a_truncated_gradient_is_located_by_step_and_lag():
    verification = rl.verify(partial(diagonal, mistake="truncated"), "diagonal", chunk=8)
    (tensor,) = [tensor for tensor in verification.wrong if tensor.name == "gradient of b"]
    assert (tensor.length, tensor.steps, tensor.rows) == (9, tuple(range(8)), (0, 1, 2))
    assert verification.lag == 1


def chunked(recurrence):
    """Return our own chunked scan as a function of the arguments of a recurrence."""

    def function(q, k, v, g, beta=None):
        decay = g[..., None] if g.dim() == 4 else g[..., None, None]
        write = k if beta is None else beta[..., None] * k
        vectors = {} if beta is None else {"right": k[..., None]}
        cell = SequenceCell(
            ("head", "key", "value"),
            (decay,),
            (write[..., None], v[..., None, :]),
            read=q[..., None] * k.shape[-1] ** -0.5,
            contracted=-2,
            **vectors,
        )
        return scan(cell)[:2] if recurrence == "gated_delta" else scan(cell)[0]

    return function


KERNELS = [
    (recurrence, function, options)
    for recurrence, function in RIGHT.items()
    for options in ({"dtype": "float64"}, {"dtype": "float32", "seed": 1}, {"dtype": "bfloat16"})
    if not (recurrence == "complex_diagonal" and options["dtype"] == "bfloat16")
]
KERNELS += [(name, chunked(name), {"chunk": 32, "dtype": "float64"}) for name in ("ssd", "gla", "gated_delta", "kda")]
KERNELS += [("gated_delta", partial(matrix, last=True), {}), ("diagonal", diagonal, {"initial": True})]
KERNELS += [
    ("complex_diagonal", diagonal, {"initial": True}),
    ("complex_diagonal", rl.torch.scan, {"dtype": "float64"}),
]


@pytest.mark.parametrize("case", range(len(KERNELS)))
def test_a_right_kernel_is_not_accused(case):
    recurrence, function, options = KERNELS[case]
    verification = rl.verify(function, recurrence, **{"chunk": 8, **options})
    assert verification.ok, str(verification)
    assert "right" in str(verification)


def test_thirty_right_kernels_are_kept():
    assert len(KERNELS) >= 30


def test_a_wrong_forward_pass_is_named_first():
    verification = rl.verify(lambda a, b: 1.01 * diagonal(a, b), "diagonal", chunk=8)
    assert "output" in {tensor.name for tensor in verification.wrong}
    assert "forward pass is wrong" in verification.cause


def test_bad_arguments_are_refused():
    with pytest.raises(rl.errors.InputError, match="verify knows no recurrence 'diagonl'"):
        rl.verify(diagonal, "diagonl")
    with pytest.raises(rl.errors.InputError, match="something else than tensors"):
        rl.verify(lambda a, b: {"y": a}, "diagonal")
    with pytest.raises(rl.errors.InputError, match="known sizes"):
        rl.verify(diagonal, "diagonal", sizes={"units": 3})
    with pytest.raises(rl.errors.InputError, match="no framework"):
        rl.verify(diagonal, "diagonal", framework="mxnet")


def test_the_command_exits_with_a_code(capsys):
    assert run(["verify", "scan_mutants:diagonal", "diagonal", "--chunk", "8"]) == 0
    assert "right: diagonal" in capsys.readouterr().out
    assert run(["verify", "scan_mutants:without_conjugate", "complex_diagonal", "--chunk", "8"]) == 3
    assert "complex conjugate" in capsys.readouterr().out
