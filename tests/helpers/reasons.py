"""Expected texts of ``rl.gradients`` for each cause of a missing gradient: code, sentence and remedy."""

from __future__ import annotations

TARGET = "gru.final_hidden"


def call(wrt: str, of: str = TARGET, options: str = 'reduce="sum", ') -> str:
    return f'rl.gradients(model, x, of="{of}", {options}wrt={wrt})'


def integer_input(dtype: str) -> tuple[str, str, str]:
    return (
        "integer_input",
        f"input holds integers ({dtype}): integers have no derivative.",
        call('"embedding.output"'),
    )


def not_on_path(name: str) -> tuple[str, str, str]:
    return (
        "not_on_path",
        f'{name} affects the output, but not "{TARGET}": the branch between them was cut off.',
        call(f'"{name}"', of="output"),
    )


def stop_gradient(name: str, layer: str) -> tuple[str, str, str]:
    return (
        "stop_gradient",
        f'"{TARGET}" depends on {name}, but a stop_gradient or detach in between blocks the gradient.',
        f"{call('<a tensor behind it>')}; remove it to train '{layer}'",
    )


def non_differentiable(name: str) -> tuple[str, str, str]:
    return (
        "non_differentiable",
        f'"{TARGET}" depends on {name} only in jumps: an argmax, a rounding, a comparison or a conversion to '
        "integers lies in between.",
        call(f'"{name}"', of="<the layer before that>.output"),
    )


def unused_layer(layer: str) -> tuple[str, str, str]:
    return (
        "unused_layer",
        f"Layer '{layer}' was not called in this forward pass, so the loss does not depend on it.",
        f"call '{layer}' in the model, or leave it out of wrt=",
    )


def relu_dead(layer: str, count: int) -> tuple[str, str, str]:
    return (
        "relu_dead",
        f"All {count} outputs of the relu '{layer}' are 0 on this batch: its gradient is 0.",
        f'rl.trace(model, x, layers=["{layer}"]) shows it; a lower learning rate or a leaky relu revives it',
    )


def frozen(name: str, layer: str) -> tuple[str, str, str]:
    return (
        "frozen",
        f"{name} is frozen: this is its gradient, but training does not change it.",
        f"make {layer} trainable to train it",
    )


def masked_at(time: int, real_time: int, name: str, of: str) -> tuple[str, str, str]:
    return (
        "masked_out",
        f"Every sample is masked at time {time}: the state there is the previous one, carried over.",
        call(f'"{name}"', of=of, options=f'at={{"time": {real_time}}}, reduce="sum", '),
    )


def masked_in_part(masked: int, steps: int) -> tuple[str, str, str]:
    return (
        "masked_out",
        f"{masked} of {steps} steps are masked: the gradient is exactly 0 there.",
        "g.where(mask) before taking means over time",
    )


def underflow(size: str, dtype: str = "float16") -> tuple[str, str, str]:
    return (
        "underflow",
        f"The gradient underflows in {dtype}: its largest entry, {size}, became 0 in the backward pass.",
        "the same call on the model in float32; to train, a loss scale (LossScaleOptimizer, GradScaler)",
    )


def reason_texts(reason) -> tuple[str, str, str]:
    return reason.code, reason.sentence, reason.remedy
