"""Keywords for matplotlib are checked before anything is drawn: a misspelt one is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from matplotlib.artist import ArtistInspector
from matplotlib.cbook import normalize_kwargs

from ..errors import InputError, did_you_mean, message


@cache
def _known(artist: type) -> tuple[frozenset[str], frozenset[str]]:
    """Settable properties of an artist class, and their aliases."""
    inspector = ArtistInspector(artist)
    aliases = {alias for names in inspector.aliasd.values() for alias in names}
    return frozenset(inspector.get_setters()), frozenset(aliases)


def checked(
    given: Mapping[str, Any],
    artist: type,
    *,
    figure: str,
    extra: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``defaults`` overridden by what the caller gave, aliases resolved.

    Raises
    ------
    InputError
        If ``artist`` has no such property and ``extra`` (further keywords of the drawing call) does not name it.
    """
    setters, aliases = _known(artist)
    known = setters | aliases | frozenset(extra)
    for name in given:
        if name not in known:
            raise InputError(
                message(
                    f"plot.{figure} and matplotlib's {artist.__name__} know no such keyword.",
                    got=f"{name}=",
                    expected=f"a property of {artist.__name__}",
                    hint=did_you_mean(name, sorted(known)).split(" Known:")[0],
                )
            )
    clear = normalize_kwargs(dict(given), artist)
    return {**(defaults or {}), **clear}
