"""Models and their modules: all of them, those that can be called, and those that hooks do not serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

_GATHERS = "which gathers parameters itself"
_NO_HOOKS = "whose code calls no hooks; attach the modules beside it"
#: Classes of modules that hooks do not serve, by name, and why.
_REFUSED = {
    "DataParallel": _GATHERS,
    "FullyShardedDataParallel": _GATHERS,
    "FSDPModule": _GATHERS,
    "ScriptModule": _NO_HOOKS,
    "TracedModule": _NO_HOOKS,
}


def modules_of(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return all modules of models, each once: as ``modules()``, but faster."""
    found: dict[int, torch.nn.Module] = {}
    stack: list[torch.nn.Module | None] = [*models]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            if module._modules:
                stack.extend(module._modules.values())
    return list(found.values())


def called(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield what can be called of a model: itself, or what is in it if it is a list or dict of modules."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for each in model.children():
            yield from called(each)
    else:
        yield model


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs code of a compiler, which calls no hooks of modules inside."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def refusal(model: torch.nn.Module, refused: Mapping[str, str] = _REFUSED) -> str:
    """Return why a model cannot be hooked, or ""; ``refused``: why, by the name of a class."""
    for name, module in model.named_modules():
        for cls in (c.__name__ for c in type(module).__mro__):
            if cls in refused:
                within = f" (its module {name!r})" if name else ""
                return f"attach() does not take a {cls}{within}, {refused[cls]}"
    return ""


def holds_any(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the model has a parameter of the optimizer."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in own for p in model.parameters())
