"""Terms of a report, each explained where it first stands in a sentence; they are those of the glossary."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

#: Short explanations, by the words that a sentence may contain.
EXPLANATIONS = {
    "skill": "1 - loss / loss of the best constant prediction: 1 is perfect, 0 is no better than a constant",
    "score": "how far predictions vary together with the targets, over samples",
    "re-initialised": "the same architecture with weights drawn anew",
    "CI": "confidence interval: the range that contains the true number in this share of repeated measurements",
    "residual test": "a test of whether the errors of the network could be predicted from its inputs",
    "state transfer": "share of a training signal at the final state that is left this many steps back",
    "vanishing gradient": "a training signal that becomes too small on its way back to change any weight",
    "training signal": "the gradient of the loss, by which training changes the weights",
    "total gradient": "the gradient through all paths, the layer's own recurrence included",
    "time Jacobian": "how much each output step changes with each input step",
    "hidden state": "what a recurrent layer hands from one step to its next",
    "Memory in use": "the smallest number of last steps on which the prediction depends, up to 5 % of its variance",
    "lag": "number of steps by which an input lies before the output",
    "quartiles": "the middle half of the samples lies between the lower and the upper quartile",
}
_PATTERN = re.compile(rf"\b({'|'.join(map(re.escape, sorted(EXPLANATIONS, key=len, reverse=True)))})\b")


def explain(text: str) -> Markup:
    """Return a sentence as HTML in which each term is explained, when pointed at, where it stands first."""
    explained: set[str] = set()

    def mark(found: re.Match[str]) -> str:
        term = found[0]
        if term in explained:
            return str(escape(term))
        explained.add(term)
        return str(Markup('<abbr title="{}">{}</abbr>').format(EXPLANATIONS[term], term))

    parts, start = [], 0
    for found in _PATTERN.finditer(text):
        parts += [str(escape(text[start : found.start()])), mark(found)]
        start = found.end()
    return Markup("".join([*parts, str(escape(text[start:]))]))
