"""``rl.torch.model``: a function and the modules that it calls, as one torch module.

The user's modules are registered as they are, so flags, hooks, weights and their gradients are those of the user. A
copy of the model, as for weights before training, needs a copy of the function as well, which calls the copied modules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ...errors import InputError, ModelError
from ..shared import hook_in_this_thread
from ..shared.function_namespaces import function_namespaces, is_foreign, namespaces

#: Containers of the standard library in which a function may keep its modules.
_CONTAINERS = (list, tuple, dict)

_CALL = "rl.torch.model(function, encoder, decoder)"


class FunctionModel(nn.Module):  # type: ignore[misc]
    """Module whose forward is a function of the user's; its submodules are the modules that the function calls."""

    def __init__(self, function: Callable[..., Any], parts: Mapping[str, Any]) -> None:
        super().__init__()
        self._modules |= {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self._parameters |= {name: part for name, part in parts.items() if isinstance(part, nn.Parameter)}
        self._set_function(function)

    def _set_function(self, function: Callable[..., Any]) -> None:
        """Store the function, and a ``forward`` with its signature, by which arguments of a call are named."""
        self.function = function
        #: Values that the function refers to; as attributes, their content is restored after every run.
        self._namespaces = list(namespaces(function, nn.Module))

        @wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self.forward = forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; raise ``ModelError`` if it called a module with weights that is not part of the model."""
        known, missing = set(self.modules()), list[nn.Module]()

        def note_missing(module: nn.Module, _args: Any) -> None:
            if module not in known and any(True for _ in module.parameters(recurse=False)):
                missing.append(module)

        handle = torch.nn.modules.module.register_module_forward_pre_hook(hook_in_this_thread(note_missing))
        try:
            returned = self.function(*args, **kwargs)
        finally:
            handle.remove()
        if missing:
            raise ModelError(
                "The function calls a module that is not part of the model.",
                got=f"{type(missing[0]).__name__}, called by {getattr(self.function, '__qualname__', 'the function')}",
                expected="every module with weights that the function calls, and in a copy the copied ones",
                hint=_CALL,
            )
        return returned

    @property
    def training(self) -> bool:
        """Whether any of the user's modules is in training mode; set by ``train()`` and ``eval()`` of the modules."""
        return any(module.training for module in self._modules.values() if module is not None)

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModel:
        """Return a copy whose function calls the copied modules."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        not_copied = ("function", "forward", "_namespaces")
        own = {name: value for name, value in vars(self).items() if name not in not_copied}
        twin.__dict__.update(copy.deepcopy(own, memo))
        twin._set_function(_Rebinding(memo).of(self.function))
        return twin


class _Rebinding:
    """Replaces objects by their copies in all that a function refers to, by ``memo`` of a deep copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        #: Objects that refer to no copied object, or are being searched.
        self._unchanged: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return a value with every copied object replaced; the value itself if it refers to none."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) not in self._unchanged and not isinstance(value, (type, ModuleType, torch.Tensor)):
            self._unchanged[id(value)] = value
            replaced = self._replaced(value)
            if replaced is not value:
                self._memo[id(value)] = replaced
            return replaced
        return value

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            return value if function is value.__func__ and owner is value.__self__ else MethodType(function, owner)
        if isinstance(value, FunctionType):
            return self._function(value)
        if type(value) in _CONTAINERS:
            parts = value.values() if isinstance(value, dict) else value
            copies = [self.of(part) for part in parts]
            if all(new is old for new, old in zip(copies, parts, strict=True)):
                return value
            return dict(zip(value, copies, strict=True)) if isinstance(value, dict) else type(value)(copies)
        if type(getattr(value, "__dict__", None)) is dict and not isinstance(value, nn.Module):
            attributes = self.of(vars(value))
            if attributes is not vars(value):
                twin = copy.copy(value)
                twin.__dict__.update(attributes)
                return twin
        return value

    def _function(self, function: FunctionType) -> Any:
        global_names, closure = function_namespaces(function)
        # Functions of other modules, such as torch's, are not searched.
        is_foreign_value = partial(is_foreign, function)
        new_globals = {k: value if is_foreign_value(value) else self.of(value) for k, value in global_names.items()}
        new_closure = {k: value if is_foreign_value(value) else self.of(value) for k, value in closure.items()}
        defaults = self.of(function.__defaults__)
        is_same = defaults is function.__defaults__ and all(
            new[name] is old[name] for new, old in ((new_globals, global_names), (new_closure, closure)) for name in old
        )
        if is_same:
            return function
        cells = [
            CellType(new_closure[name]) if name in new_closure else cell
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ]
        scope = {**function.__globals__, **new_globals}
        twin = FunctionType(function.__code__, scope, function.__name__, defaults, tuple(cells) or None)
        twin.__kwdefaults__, twin.__qualname__ = self.of(function.__kwdefaults__), function.__qualname__
        return twin


def model(function: Callable[..., Any], *modules: Any, **named: Any) -> nn.Module:
    """Return a function and the modules that it calls as one model, for every verb.

    For a loop over time that is outside of the modules: in a training script, in an agent, or in a plain class. Write
    the loop as a function from the data to the outputs, and pass it with the modules that it calls. The modules are
    not changed: weights, hooks and flags of the model are those of the modules.

    Parameters
    ----------
    function
        Function or method from the inputs to the outputs. Its parameters are the names of the inputs. It starts from
        the same state at every call.
    *modules
        Modules and parameters that the function uses. They are named after the variables that hold them, else after
        their class. Without any, those that the function refers to by its own names are taken.
    **named
        Modules and parameters with the names that results are to have.

    Returns
    -------
    torch.nn.Module
        The model, with ``function`` as its forward.

    Raises
    ------
    InputError
        If ``function`` is not callable, or something else than a module or parameter is given.
    ModelError
        At a call, if the function calls a module with weights that is not part of the model.

    Examples
    --------
    >>> import torch, rnnlens as rl
    >>> cell, head = torch.nn.GRUCell(3, 4), torch.nn.Linear(4, 2)
    >>> def classify(lines):
    ...     hidden = torch.zeros(len(lines), 4)
    ...     for t in range(lines.shape[1]):
    ...         hidden = cell(lines[:, t], hidden)
    ...     return head(hidden)
    >>> rl.trace(rl.torch.model(classify, cell, head), torch.randn(2, 5, 3))["cell"].hidden.shape
    (2, 5, 4)
    """
    if not callable(function) or isinstance(function, nn.Module):
        got = f"a {type(function).__name__}"
        hint = "a module with a forward is a model: rl.trace(module, x)" if isinstance(function, nn.Module) else _CALL
        raise InputError("rl.torch.model takes a function of the data.", got=got, expected="a function", hint=hint)
    for part in (*modules, *named.values()):
        if not isinstance(part, (nn.Module, nn.Parameter)):
            got, expected = type(part).__name__, "torch.nn.Module or torch.nn.Parameter"
            raise InputError("A part of a model is a module or a parameter.", got=got, expected=expected, hint=_CALL)
    scopes = list(namespaces(function, nn.Module))
    owner = getattr(function, "__self__", None)
    if not modules and not named:
        own = [part for scope in scopes for part in scope.values() if isinstance(part, (nn.Module, nn.Parameter))]
        modules = tuple({id(part): part for part in ([owner] if isinstance(owner, nn.Module) else own)}.values())
    caller = sys._getframe(1)
    scopes += [caller.f_locals, caller.f_globals]
    parts = dict(named)
    for part in {id(part): part for part in modules}.values():
        names = (name for scope in scopes for name, value in scope.items() if value is part and name[0] != "_")
        name = base = next(names, type(part).__name__.lower())
        number = 0
        while name in (*parts, "function") or hasattr(nn.Module, name):
            number += 1
            name = f"{base}_{number}"
        parts[name] = part
    if not parts:
        raise InputError("No module was given.", got="a function alone", expected="the modules it calls", hint=_CALL)
    return FunctionModel(function, parts)
