"""Ports within a whole-sequence layer: the input of its scan, and the readout."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import LayerNotFoundError, UnsupportedError
from ...recurrence.sequence import SequenceCell
from ..protocol import Port
from .assemble import PortTensors
from .record import call_numbers
from .scans import ScanRecorder

#: Kinds of these ports.
SCAN_PORTS = ("scan_input", "scan_output")


def scan_boundary(recorder: ScanRecorder, port: Port) -> PortTensors:
    """Return the tensor behind a port of a scan: its readout, or the tensor of which its input is a view.

    Raises
    ------
    LayerNotFoundError
        If the name selects no one scan of this pass.
    UnsupportedError
        For the input of a scan whose coefficients are not computed from it.
    """
    names = call_numbers([record.layer for record in recorder.records])
    records = {record.layer + name: record for name, record in zip(names, recorder.records, strict=True)}
    record = records.get(str(port.layer))
    if record is None:
        message = f"Layer {port.layer!r} has no scan of its own in this forward pass."
        raise LayerNotFoundError(message, expected=f"one of {', '.join(map(repr, records))}")
    if port.kind == "scan_output":
        return PortTensors([record.output])
    values = record.values
    if values is None or not (recorder.is_frozen or _makes_coefficients(values, record.cell)):
        raise UnsupportedError(
            f"The coefficients of the scan in {port.layer!r} are not computed from the scan's input.",
            got=f"a recurrence over {', '.join(record.cell.axes)}",
            expected="a layer of Mamba-1, whose input makes decay, write and read",
            hint=f'rl.jacobian(model, x, of="{record.layer}.output", wrt="{record.layer}.input", frozen=True)',
        )
    source = _viewed(values)
    positions = torch.empty_strided(source.shape, source.stride(), dtype=torch.long)
    positions.copy_(torch.arange(source.numel()).view(source.shape))
    offset = values.storage_offset() - source.storage_offset()
    index = positions.as_strided(values.shape, values.stride(), offset).to(source.device)
    return PortTensors([source], lambda parts: parts[0].reshape(-1)[index])


def _viewed(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a view shows: transposed ones reach a scan and its coefficients from there."""
    return tensor if tensor._base is None else tensor._base


def _makes_coefficients(values: Tensor, cell: SequenceCell) -> bool:
    """Return whether time step, write and read of a selective scan all depend on its input."""
    coefficients = (cell.decay[0], cell.write[1], cell.read)
    source = _viewed(values)
    return source.requires_grad and all(
        torch.autograd.grad(part.sum(), source, retain_graph=True, allow_unused=True)[0] is not None  # type: ignore[union-attr]
        for part in coefficients
    )
