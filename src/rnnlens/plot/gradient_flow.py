"""``gradient_flow``: decay of the gradient over time, for layers, networks or moments of a training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from ..errors import InputError, did_you_mean, has_attribute
from ..measures.profiles import gradient_reach, peak_band
from ..results.gradient_lags import layer_reach, norms_by_lag
from ..results.schema import with_mask
from ..vocabulary import BACKWARD, DIRECTION, QUANTITIES, SAMPLE, TIME
from . import _axes, _data, _frame, _samples
from ._call import drawing
from ._data import Numbers

#: Gradients with words of their own, drawn for each layer that has them: label, colour, line style.
GRADIENTS = {
    "hidden_grad": ("total, $dL/dh_t$", _axes.BLUE, "-"),
    "cell_grad": ("total, $dL/dc_t$", _axes.GREEN, "-"),
    "output_grad": ("direct, $\\partial{}L/\\partial{}y_t$", _axes.ORANGE, "--"),
}
#: Colours of the total gradients of other states, in turn.
_STATE_COLOURS = (_axes.PINK, _axes.LIGHT_BLUE, *_axes.CYCLE[5:])
#: Styles if there are two lines: before, in grey, and after.
_PAIR = ("#8c8c8c", _axes.ORANGE)
#: Lower end of the value axis as a share of the peak; smaller shares are marked by an arrow.
FLOOR = 1e-6
#: Width in inches of the user's figure below which panels are stacked.
_NARROW = 5.0


@dataclass(frozen=True)
class FadingLine:
    """One line of the figure: one gradient of one direction over time."""

    gid: str
    label: str
    steps: Numbers
    #: Median and quartiles over samples of the norm over units, each sample divided by its own peak.
    median: Numbers
    low: Numbers
    high: Numbers
    #: Steps back that hold 95 % of the squared gradient; 0 if it stays at its own step, None if it is not known.
    reach: int | None
    #: Number of steps at which the gradient is 0 in every sample.
    zeros: int
    #: Steps with a non-finite value; steps that are padding in every sample.
    bad: Numbers
    padded: Numbers
    time_label: str
    #: Where a sample's state was set anew, with a time axis; None if nowhere.
    reset: xr.DataArray | None
    notes: tuple[str, ...]
    colour: str
    style: str = "-"

    @property
    def legend_label(self) -> str:
        """The line's entry in the legend."""
        count = len(self.steps) - len(self.padded)
        if self.zeros and count > 1:
            zero_steps = "all" if self.zeros >= count else f"{self.zeros} of {count}"
            return f"{self.label}: 0 at {zero_steps} steps"
        return self.label if self.reach is None else f"{self.label}: {_step_text(self.reach)}"


def _step_text(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


#: Lines of each panel; a panel is a layer and a direction.
PanelLines = dict[tuple[str, str | None], list[FadingLine]]


@drawing(Line2D)
def gradient_flow(
    trace: Any,
    *,
    quantity: str = "hidden_grad",
    shared: bool = True,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw how the gradient of the loss decays over time, a panel per layer and direction.

    A line is the median over samples of the Euclidean norm over units, each sample divided by its own peak, so that a
    few hard samples do not dominate; the band has the quartiles. The legend gives the *reach* of each state: the number
    of steps back, from the step where the gradient enters, that hold 95 % of its square; 0 if it stays at its own step.
    Where the loss reads several steps, every step has a gradient, whatever the recurrence carries: the reach is then
    that of single output steps (``hidden_lag_gradient``). The title, and the legend of a comparison of networks, give
    the longest reach of a layer's states: an LSTM remembers by its cell state. The value axis ends at 1e-6; an arrow
    marks where a line falls below. The legend counts steps with a gradient of exactly 0, which a logarithmic axis
    cannot show.

    Parameters
    ----------
    trace
        A trace made with a loss, or one layer of it: its direct and total gradients. Or a mapping from names to traces
        or layers (networks, or moments of a training): a line for each; of two, the first is grey. Layers have
        ``hidden_grad``, ``cell_grad`` or the gradient of another state (sample, time, unit), or ``output_grad`` (also
        without time). Layers whose gradients have other axes, as those that run whole sequences, are not drawn.
    quantity
        Gradient to compare: ``"hidden_grad"``, ``"cell_grad"``, that of another state, or ``"output_grad"``.

    Returns
    -------
    1-D array of Axes, one per layer and direction, forward before backward; below each other on a narrow ``figure``

    Examples
    --------
    >>> axes = rl.plot.gradient_flow(trace)
    >>> len(axes)  # one layer
    1
    """
    networks = _layers_by_network(trace)
    layers = _data.layers_of(trace, "gradient_flow") if networks is None else None
    lines_by_panel = (
        _lines_of_network(layers, as_computed)
        if layers is not None
        else _lines_of_networks(networks or {}, quantity, as_computed)
    )
    if not lines_by_panel:
        raise _no_lines_error(
            [layers] if layers is not None else (networks or {}).values(), quantity if networks else None
        )
    panels = _open_panels(list(lines_by_panel), ax, figure)
    all_values = np.concatenate(
        [
            line_values
            for lines in lines_by_panel.values()
            for fading_line in lines
            for line_values in (fading_line.median, fading_line.low)
        ]
    )
    for panel_ax, ((layer, direction), lines) in zip(panels.axes, lines_by_panel.items(), strict=True):
        values = (
            all_values
            if shared
            else np.concatenate(
                [line_values for fading_line in lines for line_values in (fading_line.median, fading_line.low)]
            )
        )
        _draw_lines(panel_ax, lines, line, values)
        name = " · ".join(line_values for line_values in (layer, direction) if line_values)
        panel_ax.set_title(_panel_title(name, lines), fontsize="small", pad=4)
        has_reach = any(fading_line.reach is not None for fading_line in lines)
        legend_title = "steps back that carry 95 %" if has_reach else None
        style: dict[str, Any] = {"fontsize": "x-small", "title_fontsize": "x-small", "alignment": "left"}
        panel_ax.legend(title=legend_title, loc="best", framealpha=0.85, **style)
    if shared:
        panels.hide_inner_ticks()
    for panel_ax, lines in zip(panels.axes, lines_by_panel.values(), strict=True):
        if panel_ax.xaxis.get_tick_params().get("labelbottom", True):
            panel_ax.set_xlabel(lines[0].time_label, fontsize="small")
    panels.label_value_axis("share of the sample's peak")
    notes = dict.fromkeys(
        note for lines in lines_by_panel.values() for fading_line in lines for note in fading_line.notes
    )
    drawn_layers = {layer for layer, _ in lines_by_panel}
    notes |= {
        f"{layer} is not drawn: its gradients are not over (sample, time, unit)": None
        for layer, dataset in (layers or {}).items()
        if _styles(dataset) and layer not in drawn_layers
    }
    reading_note = "median over samples, each by its own peak; band: quartiles"
    return panels.with_title(title or _default_title(lines_by_panel), [reading_note, *notes])


def _default_title(lines_by_panel: PanelLines) -> str:
    """Return the reach of three or more networks in one panel as a sentence, else the name of the quantity."""
    (lines, *further_panels) = lines_by_panel.values()
    reaches = [str(line.reach) for line in lines if line.reach is not None]
    if (
        further_panels
        or not any(line.reach for line in lines)
        or not 3 <= len(lines) == len(reaches) <= 5
        or len({line.gid for line in lines}) > 1
    ):
        return "Gradient of the loss through time"
    return f"The gradient reaches back {', '.join(reaches[:-1])} and {_step_text(int(reaches[-1]))}"


def _layers_by_network(trace: Any) -> dict[str, dict[str, xr.Dataset]] | None:
    """Return layers by network if a mapping has several networks or moments; None for one trace."""
    if isinstance(trace, xr.DataTree | xr.Dataset) or has_attribute(trace, "layers") or not isinstance(trace, Mapping):
        return None
    networks: dict[str, dict[str, xr.Dataset]] = {}
    for name, network in trace.items():
        if (
            not isinstance(network, xr.DataTree)
            and _data.dataset_of(network) is None
            and not isinstance(network, Mapping)
        ):
            return None  # layers_of raises a clear error
        networks[str(name)] = _data.layers_of(network, "gradient_flow")
    return networks


def _lines_of_network(layers: Mapping[str, xr.Dataset], as_computed: bool) -> PanelLines:
    """Return the lines to draw for one network, by panel (layer, direction): one for each kind of gradient."""
    lines_by_panel: PanelLines = {}
    for layer, dataset in layers.items():
        for quantity, (label, colour, style) in _styles(dataset).items():
            for direction, fading_line in _gradient_lines(
                dataset, quantity, as_computed, label=label, colour=colour, style=style
            ):
                lines_by_panel.setdefault((layer, direction), []).append(fading_line)
    return lines_by_panel


def _lines_of_networks(
    networks: Mapping[str, Mapping[str, xr.Dataset]], quantity: str, as_computed: bool
) -> PanelLines:
    """Return the lines of several networks by panel: a panel for each shared layer, or one, with a line per network."""
    lines_by_panel: PanelLines = {}
    has_several_layers = any(len(layers) > 1 for layers in networks.values())
    has_same_layers = has_several_layers and len({tuple(layers) for layers in networks.values()}) == 1
    colours = _PAIR if len(networks) == 2 else _axes.line_colours(len(networks))
    for (network, layers), colour in zip(networks.items(), colours, strict=True):
        for layer, dataset in layers.items():
            label = network if has_same_layers or len(layers) == 1 else f"{network} {layer}"
            lines = _gradient_lines(dataset, quantity, as_computed, of_layer=True, label=label, colour=colour)
            for direction, fading_line in lines:
                lines_by_panel.setdefault((layer if has_same_layers else "", direction), []).append(fading_line)
    return lines_by_panel


def _styles(dataset: xr.Dataset) -> dict[str, tuple[str, str, str]]:
    """Return label, colour and line style of each gradient of a layer: of its states, hidden first, and the direct."""
    direct = "output_grad"
    other_states = {
        "state_grad": "total, $dL/dS_t$",
        **{
            str(name): f"total, dL/d{str(name).removesuffix('_grad')}_t"
            for name, array in dataset.data_vars.items()
            if str(name).endswith("_grad") and name not in QUANTITIES and {SAMPLE, TIME} <= set(array.dims)
        },
    }
    colours = _STATE_COLOURS * len(other_states)
    styles = {name: style for name, style in GRADIENTS.items() if name != direct}
    styles |= {name: (label, colour, "-") for (name, label), colour in zip(other_states.items(), colours, strict=False)}
    return {name: style for name, style in {**styles, direct: GRADIENTS[direct]}.items() if name in dataset}


def _is_over_units(array: xr.DataArray) -> bool:
    unit = _data.unit_dim(array)
    return unit is not None and set(array.dims) <= {SAMPLE, TIME, DIRECTION, unit}


def _no_lines_error(networks: Iterable[Mapping[str, xr.Dataset]], quantity: str | None) -> InputError:
    """Return the error for layers without a gradient that can be drawn; ``quantity``: the one to compare, if any."""
    arrays = [
        (layer, dataset[name]) for layers in networks for layer, dataset in layers.items() for name in _styles(dataset)
    ]
    undrawn_arrays = [(layer, array) for layer, array in arrays if quantity in (None, array.name)]
    names = quantity or "hidden_grad, cell_grad, the gradient of another state, or output_grad"
    if not undrawn_arrays:
        hint = did_you_mean(quantity, {str(array.name) for _, array in arrays}) if quantity else None
        hint = hint or "trace with a loss: rl.trace(model, x, y)"
        return InputError("plot.gradient_flow found no gradient.", expected=names, hint=hint)
    layer, array = undrawn_arrays[0]
    other_dims = [str(dim) for dim in array.dims if dim not in (SAMPLE, TIME, DIRECTION)]
    return InputError(
        "plot.gradient_flow draws gradients over (sample, time, unit).",
        got=f"{array.name} ({', '.join(map(str, array.dims))}) of {layer}",
        expected=f"{names}: dimensions with 'unit' among them",
        hint=f"rl.plot.curves((trace[{layer!r}].{array.name} ** 2).sum({other_dims}) ** 0.5, log=True) draws its norm",
    )


def _gradient_lines(
    dataset: xr.Dataset, quantity: str, as_computed: bool, *, of_layer: bool = False, **line_options: str
) -> Iterator[tuple[str | None, FadingLine]]:
    """Yield direction and line of one gradient of a layer; nothing if the layer does not have it over units.

    ``of_layer``: the reach is that of the layer, of all its states, not of the drawn state.
    """
    quantity = _data.state_gradient(dataset, quantity)
    if quantity not in _styles(dataset) or not _is_over_units(dataset[quantity]):
        return
    array = _data.label_array(with_mask(dataset, quantity), "gradient_flow")
    nonfinite_note, *padding_notes = _samples.notes_of(array)
    layer = str(dataset.attrs.get("layer", ""))
    quantity_name = ", ".join(part for part in (layer, _data.value_label(array).split(" [")[0]) if part)
    notes = (
        *(note for note in padding_notes if note),
        *([f"{quantity_name}: {nonfinite_note}"] if nonfinite_note else []),
    )
    for view in _data.direction_views(array, as_computed=as_computed):
        is_backward = BACKWARD in (view.name, dataset.attrs.get("direction"))
        from_start = is_backward and not (as_computed and view.name == BACKWARD)
        count = dataset.sizes.get(TIME, 1)
        by_lag = norms_by_lag(dataset, view.name, dataset["mask"].values if "mask" in dataset else None)
        line = _summarise_line(quantity, view, count, from_start=from_start, notes=notes, **line_options)
        if quantity in by_lag:
            line = replace(line, reach=layer_reach(by_lag) if of_layer else gradient_reach(by_lag[quantity]))
        yield view.name, line


def _summarise_line(
    quantity: str, view: _data.DirectionView, count: int, *, from_start: bool, **line_options: Any
) -> FadingLine:
    """Summarise one direction over samples; ``from_start``: the recurrence ends at the first step."""
    values = view.data
    with_time = values if TIME in values.dims else values.expand_dims(TIME)
    norms = _data.numpy_by_sample(_data.norm_over(with_time, [_data.unit_dim(with_time)]), TIME).astype(np.float64)
    is_real = _samples.real_step_mask(values)
    steps = _data.positions(values, TIME) if TIME in values.dims else np.array([0 if from_start else count - 1])
    peak_profile = peak_band(norms, is_real)
    is_padding = ~is_real.any(axis=0)
    is_nonfinite = ~np.isfinite(values.values).all(axis=tuple(i for i, d in enumerate(values.dims) if d != TIME))
    is_nonfinite = np.atleast_1d(is_nonfinite) & ~is_padding
    band: dict[str, Any] = {
        name: np.where(is_nonfinite, np.nan, getattr(peak_profile, name)) for name in ("median", "low", "high")
    }
    zeros = int(((norms == 0) | ~is_real).all(axis=0).sum() - is_padding.sum())
    line_options |= {"bad": steps[is_nonfinite], "padded": steps[is_padding], "reset": values.coords.get("reset")}
    label = view.time_label
    return FadingLine(quantity, steps=steps, reach=None, zeros=zeros, time_label=label, **band, **line_options)


def _open_panels(keys: Sequence[tuple[str, str | None]], ax: Any, figure: Any) -> _frame.Panels:
    """Open one panel per layer and direction: side by side, or below each other in a narrow figure."""
    direction_count = max(1, len({direction for _, direction in keys}))
    columns = direction_count if direction_count > 1 or len(keys) == 1 else min(2 if len(keys) == 4 else 3, len(keys))
    if isinstance(figure, Figure | SubFigure) and figure.bbox.width / figure.dpi < _NARROW:
        columns = 1
    size = (5.2, 3.1) if len(keys) == 1 else (3.5, 2.7) if columns < 3 else (2.9, 2.7)
    shape = (math.ceil(len(keys) / columns), columns)
    return _frame.open_panels("gradient_flow", len(keys), ax, figure, size=size, margin=(0.8, 1.0), shape=shape)


def _panel_title(name: str, lines: Sequence[FadingLine]) -> str:
    """Return the panel's title: over how many steps the gradient reaches back, for one or two networks."""
    reaches = [fading_line.reach for fading_line in lines if fading_line.reach is not None]
    is_comparison = (
        len({fading_line.label for fading_line in lines}) == 2 and len(reaches) == 2 and lines[0].gid == lines[1].gid
    )
    if not reaches or not (is_comparison or len(lines) == 1 or lines[0].gid != lines[-1].gid):
        return name
    longest = max(reaches)
    if not is_comparison and not longest:
        return f"{name}: the gradient\nstays at its own step" if name else "the gradient stays at its own step"
    steps_text = f"{reaches[0]} → {_step_text(reaches[1])}" if is_comparison else _step_text(longest)
    sentence = f"{steps_text} back carry 95 % of the gradient"
    return f"{name}: {steps_text} back\ncarry 95 % of the gradient" if name else sentence


def _draw_lines(ax: Any, lines: Sequence[FadingLine], keywords: Mapping[str, Any], values: Numbers) -> None:
    """Draw median and band of each line, padding, and an arrow where a line falls below the axis."""
    for fading_line in lines:
        positive_median = np.where(fading_line.median > 0, fading_line.median, np.nan)
        # Points would not show as a line.
        has_lone_points = int(np.isfinite(positive_median).sum()) <= max(3, len(positive_median) // 8)
        style = {"color": fading_line.colour, "linestyle": fading_line.style, "linewidth": 2.2, "markersize": 4}
        style |= {"marker": "o" if has_lone_points else None, "label": fading_line.legend_label, "gid": fading_line.gid}
        ax.plot(fading_line.steps, positive_median, **{**style, **keywords})
        low = np.where(fading_line.low > 0, fading_line.low, np.where(fading_line.median > 0, FLOOR * 1e-3, np.nan))
        _axes.draw_band(ax, fading_line.steps, low, fading_line.high, fading_line.colour, alpha=0.18)
        _axes.mark_nonfinite(ax, fading_line.bad)
    longest = max(lines, key=lambda fading_line: len(fading_line.steps))
    _samples.shade_padding(ax, longest.padded, np.ones(len(longest.padded), dtype=bool))
    _samples.mark_resets(ax, longest.reset, longest.steps)
    _axes.set_log_axis(ax)
    _axes.set_log_limits(ax, np.maximum(values, np.where(values > 0, FLOOR, 0)), headroom=2)
    if ax.get_ylim()[0] < FLOOR or (values == 0).any():
        ax.set_ylim(bottom=FLOOR)
    _axes.tick_steps(ax, "x", np.concatenate([fading_line.steps for fading_line in lines]), margin=0.5)
    for fading_line in lines:
        _draw_arrow_below(ax, fading_line)


def _draw_arrow_below(ax: Any, fading_line: FadingLine) -> None:
    """Draw an arrow at the lower border where a line leaves the axis."""
    floor = ax.get_ylim()[0]
    is_below = (fading_line.median > 0) & (fading_line.median < floor)
    below_edges = np.flatnonzero(is_below & ~(np.roll(is_below, 1) & np.roll(is_below, -1)))
    inner_edges = [
        i for i in below_edges if any(0 <= j < len(is_below) and fading_line.median[j] >= floor for j in (i - 1, i + 1))
    ]
    if not inner_edges:
        return
    if not any(text.get_gid() == "below" for text in ax.texts):
        # The text is under the line.
        line_rises = inner_edges[-1] + 1 < len(is_below) and fading_line.median[inner_edges[-1] + 1] >= floor
        offset, alignment = ((12, 2), "left") if line_rises else ((-12, 2), "right")
        style: dict[str, Any] = {"over": ax.get_xaxis_transform(), "color": "0.3", "bbox": _axes.TEXT_BOX, "zorder": 5}
        point = (float(fading_line.steps[inner_edges[-1]]), 0)
        _axes.write_text(
            ax, f"below {_axes.short_number(floor)}", point, offset, ha=alignment, va="baseline", gid="below", **style
        )
    style = {
        "marker": "v",
        "markersize": 6,
        "linestyle": "",
        "clip_on": False,
        "zorder": 4,
        "color": fading_line.colour,
    }
    ax.plot(
        fading_line.steps[inner_edges],
        np.zeros(len(inner_edges)),
        transform=ax.get_xaxis_transform(),
        gid="below",
        **style,
    )
