"""The verdict of :func:`rnnlens.verify`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that differs from the reference by more than rounding explains.

    Attributes
    ----------
    name
        ``"output"``, ``"last state"``, or ``"gradient of ..."`` an argument.
    length
        Number of steps of the run.
    error, bound
        Largest difference relative to the largest reference value, and how much rounding explains.
    steps, rows
        Steps and samples at which it differs, of those compared; empty for a tensor without that axis.
    """

    name: str
    length: int
    error: float
    bound: float
    steps: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        places = []
        if self.steps:
            steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
            places.append(f"at {len(self.steps)} of {self.length} steps ({steps})")
        if self.rows:
            places.append(f"in samples {', '.join(map(str, self.rows))}")
        return f"{self.name}: off by {self.error:.2g} (rounding explains {self.bound:.1g}) {' '.join(places)}".strip()


@dataclass(frozen=True)
class Verification:
    """Verdict on the gradient of one function or model.

    Attributes
    ----------
    recurrence, dtype
        What was verified, and in which dtype.
    lengths
        Numbers of steps of the runs.
    wrong
        Tensors that differ, of the shortest length at which any did; empty if all are right.
    lag
        Number of steps back from the last from which on a gradient of the last step alone is wrong; None if it is not.
    cause
        The likeliest cause: a known mistake that gives the same wrong numbers, or "".
    compared
        Names of all compared tensors.
    reach
        Of a cell, layer or model: how many steps back from the last one its gradient is large enough to be compared.
    """

    recurrence: str
    dtype: str
    lengths: tuple[int, ...]
    wrong: tuple[WrongTensor, ...] = ()
    lag: int | None = None
    cause: str = ""
    compared: tuple[str, ...] = field(default=(), repr=False)
    reach: int | None = None

    @property
    def ok(self) -> bool:
        """Whether all tensors agree with the reference."""
        return not self.wrong

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        if self.ok:
            reach = "" if self.reach is None else f", {self.reach} steps back"
            return f"right: {self.recurrence} in {self.dtype}, {lengths} steps{reach}: {', '.join(self.compared)}"
        lines = [f"WRONG: {self.recurrence} in {self.dtype}", *(f"  {tensor}" for tensor in self.wrong)]
        if self.lag is not None:
            lines.append(f"  lag: the gradient of the last step is wrong from {self.lag} steps back")
        lines.append(f"  cause: {self.cause or 'no known mistake gives these numbers'}")
        return "\n".join(lines)
