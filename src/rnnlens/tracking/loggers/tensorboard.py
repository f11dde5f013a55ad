"""TensorBoard: scalars, histograms and the film as an image, through the user's writer."""

from __future__ import annotations

from typing import Any

from ..records import Record
from .film import Film
from .named import distributions, numbers


class TensorBoard:
    """Writes through a ``SummaryWriter``: torch's, tensorboardX's, or TensorFlow's.

    Parameters
    ----------
    writer
        As its user made it. It is flushed at the end, and closed only if ``owned``.
    """

    def __init__(self, writer: Any, *, owned: bool = False) -> None:
        self._writer, self._owned, self._film, self._last = writer, owned, Film(), 0
        self._write: Any = _Torch(writer) if hasattr(writer, "add_scalar") else _TensorFlow(writer)

    def write(self, record: Record) -> None:
        """One point per scalar, one histogram per array, at the step of the record."""
        self._last = record.step
        for name, value in numbers(record).items():
            self._write.scalar(name, value, record.step)
        for name, values in distributions(record):
            self._write.histogram(name, values, record.step)
        if self._film.add(record):
            self._draw()

    def close(self, reason: str) -> None:
        """The whole film, and everything on disk."""
        self._draw()
        self._writer.flush()
        if self._owned:
            self._writer.close()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._write.image(name, picture, self._last)


class _Torch:
    """The calls of torch's ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        self.writer.add_histogram(name, values, step)

    def image(self, name: str, picture: Any, step: int) -> None:
        self.writer.add_image(name, picture, step, dataformats="HWC")


class _TensorFlow:
    """The calls of ``tf.summary``, within the writer."""

    def __init__(self, writer: Any) -> None:
        import tensorflow as tf

        self.writer, self.summary = writer, tf.summary

    def scalar(self, name: str, value: float, step: int) -> None:
        with self.writer.as_default():
            self.summary.scalar(name, value, step=step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        with self.writer.as_default():
            self.summary.histogram(name, values, step=step)

    def image(self, name: str, picture: Any, step: int) -> None:
        with self.writer.as_default():
            self.summary.image(name, picture[None], step=step)
