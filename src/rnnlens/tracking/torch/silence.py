"""Why there was nothing to record, in the words of the training."""

from __future__ import annotations

from ...adapters.torch.training_capture import TrainingCapture
from ...errors import UnsupportedError, message

NO_STEP = "no optimizer that holds weights of the model has stepped; watch.step() tells the steps of other loops"


def why_unheard(listener: TrainingCapture) -> str:
    """Why no gradient of a recurrent layer was heard in a batch that was due."""
    names = ", ".join(path for path, _ in listener.heard)
    if listener.differentiates_gradients:
        return (
            "the step differentiates a gradient again (create_graph=True, as a gradient penalty does), so that what "
            f"arrives at {names} is no gradient of the loss alone; a probe can be followed"
        )
    if listener.forwards == 0:
        return f"{names} did not run in Python in the batches that were due"
    if listener.evaluations == listener.forwards:
        return "the model was in evaluation mode, as in a validation: model.train()"
    if listener.without_graph:
        return f"what {names} returned needs no gradient (torch.no_grad, or frozen weights and inputs)"
    return f"no gradient arrived at {names}: no path leads there from what was differentiated"


def refuse_unheard(listener: TrainingCapture) -> None:
    """Raise if there is nothing among the layers watched that batch mode can hear."""
    if not listener.heard:
        raise UnsupportedError(
            message(
                "Batch mode hears nn.RNN, nn.LSTM, nn.GRU and their cells, and there is none among the layers watched.",
                got=", ".join(listener.others) or "no recurrent layer of torch's own",
                hint="a probe shows every layer: rl.torch.watch(model, path, probe=(x, y), loss=loss)",
            )
        )
