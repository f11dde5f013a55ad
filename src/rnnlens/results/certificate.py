"""``Certificate``: the outcome of comparing a result with a reference run of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from .checks import Check

State = Literal["passed", "failed", "could not", "off"]


@dataclass(frozen=True)
class Certificate:
    """Outcome of comparing a result with a reference run of the model by its framework alone.

    Attributes
    ----------
    state
        ``"passed"``; ``"failed"``; ``"could not"`` if nothing could be compared, with the reason in ``why``; ``"off"``
        if ``rl.options(certify=...)`` disables certificates.
    against
        Framework of the reference run.
    certified
        Names of the quantities that were compared.
    resting
        Names of quantities that the framework does not return, and that follow from the compared ones.
    uncertified
        Names of all other quantities.
    checks
        All comparisons: each a residual, and the bound that rounding explains.
    """

    state: State = "off"
    against: str = ""
    certified: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()
    uncertified: tuple[str, ...] = ()
    why: str = ""
    checks: tuple[Check, ...] = ()

    @classmethod
    def of(cls, against: str, checks: Iterable[Check], **words: Any) -> Self:
        """Build a certificate from comparisons: passed if all passed, failed if one failed, "could not" without any."""
        found = tuple(checks)
        if not found:
            return cls("could not", against, why="no computed quantity can be compared with a reference run", **words)
        return cls("passed" if all(check.ok for check in found) else "failed", against, checks=found, **words)

    @property
    def worst(self) -> Check | None:
        """The comparison with the largest ratio of residual to bound; None without comparisons."""
        return max(self.checks, key=lambda check: _closeness(check), default=None)

    @property
    def sentence(self) -> str:
        """The outcome as one line of text.

        >>> Certificate.of("torch", [Check("reference loss", "", 1e-8, 1e-5)], certified=("loss",)).sentence
        'certified against torch: worst 1e-08 (loss); rounding explains 1e-05. Certified: loss'
        >>> Certificate("could not", "torch", why="the model draws random numbers").sentence
        'could not certify: the model draws random numbers'
        """
        if self.state == "off":
            return "not certified in this call (rl.options(certify=...))"
        if self.state == "could not":
            return f"could not certify: {self.why}"
        worst = self.worst
        assert worst is not None
        where = " ".join(part for part in (worst.layer, worst.name.removeprefix("reference ")) if part)
        if self.state == "failed":
            failed = sum(not check.ok for check in self.checks)
            head = f"NOT certified against {self.against}: {failed} of {len(self.checks)} comparisons failed"
            return f"{head}, worst {worst.residual:.1g} ({where}); rounding explains {worst.bound:.1g}"
        text = f"certified against {self.against}: worst {worst.residual:.1g} ({where})"
        text += f"; rounding explains {worst.bound:.1g}. Certified: {', '.join(self.certified)}"
        if self.resting:
            text += f"; {', '.join(self.resting)} rest on them"
        return text + "".join(f"; not certified: {what}" for what in self.uncertified)

    def to_dict(self) -> dict[str, Any]:
        """Convert the certificate to plain strings, numbers and lists, as stored in files."""
        lists = {key: list(getattr(self, key)) for key in ("certified", "resting", "uncertified")}
        checks = [check.to_dict() for check in self.checks]
        return {"state": self.state, "against": self.against, "why": self.why, **lists, "checks": checks}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Rebuild a certificate from the mapping that :meth:`to_dict` returned."""
        words = {key: tuple(stored.get(key, ())) for key in ("certified", "resting", "uncertified")}
        checks = tuple(Check(**check) for check in stored.get("checks", ()))
        return cls(stored["state"], stored.get("against", ""), why=stored.get("why", ""), checks=checks, **words)


def _closeness(check: Check) -> float:
    return float("inf") if check.residual != check.residual else check.residual / check.bound
