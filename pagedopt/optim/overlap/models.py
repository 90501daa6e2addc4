"""The attached models: which modules they have now, and whether their hooks are in place."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, methodcaller
from typing import Any

import torch

from ...system.compare_tensors import identities
from ..step.pending import memory_of
from . import hooks

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


_submodules, _values = attrgetter("_modules"), methodcaller("values")
_pre_hooks, _forward_hooks = attrgetter("_forward_pre_hooks"), attrgetter("_forward_hooks")


def _within(modules: Iterable[torch.nn.Module]) -> bytes:
    """Return the ids of all modules that these own."""
    return identities((*chain.from_iterable(owned.values() for owned in map(_submodules, modules) if owned),))


class Models:
    """The attached models of one overlap.

    All modules have the same hook objects, so a look at a module tells whether they are in place.

    Args:
        overlap: what the hooks call.
    """

    def __init__(self, overlap: hooks.Waits) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # that modules() has returned, and what was within them
        self._within: bytes | None = None
        self._enter, self._leave = hooks.Enter(overlap), hooks.Leave(overlap)
        self._raised, self._fence, self._load = hooks.Raised(overlap), hooks.Fence(overlap), hooks.Load(overlap)
        self._handles: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[torch.nn.Module]:
        """Yield the models that are alive."""
        return (model for ref in self._models if (model := ref()) is not None)

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether a module is one of the models."""
        return any(each is module for model in self for each in called(model))

    def is_all(self, module: torch.nn.Module) -> bool:
        """Return whether a module is the only model."""
        return len(self._models) == 1 and self._models[0]() is module

    def above(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the modules of the models that hold a module, at whatever depth."""
        holders: dict[Any, list[torch.nn.Module]] = {}
        for each in self.modules():
            for child in each._modules.values():
                holders.setdefault(child, []).append(each)
        found, stack = dict[torch.nn.Module, None](), [module]
        while stack:
            for holder in holders.get(stack.pop(), ()):
                if holder not in found:
                    found[holder] = None
                    stack.append(holder)
        return [*found]

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that the models have now, each once."""
        before: list[Any] = [ref() for ref in self._modules]
        if id(None) in map(id, before) or _within(before) != self._within:
            found = modules_of(self)
            self._modules, self._within = [*map(weakref.ref, found)], _within(found)
            return found
        return before

    def name_of(self, param: torch.Tensor) -> str:
        """Return the name of a parameter, or of the parameter that a view shares memory with."""
        memory = memory_of(param)
        named = (each for model in self for each in model.named_parameters())
        return next((f"parameter {name!r}" for name, p in named if memory_of(p) == memory), "a parameter")

    def add(self, model: torch.nn.Module) -> None:
        """Hook a model.

        Raises:
            ValueError: it cannot be hooked, or is attached; nothing has changed.
        """
        if why := refusal(model):
            raise ValueError(why)
        if any(each is model for each in self):
            raise ValueError(f"this {type(model).__name__} is attached")
        unhooked = self.unhooked(modules_of([model]))
        try:
            for module in unhooked:
                self.hook(module)
        except BaseException:
            for module in unhooked:
                self._unhook(module)
            raise
        self._models.append(weakref.ref(model))
        self._within = None

    def remove_all(self) -> None:
        """Take all hooks away, and forget the models."""
        for module in list(self._handles):
            self._unhook(module)
        self._models, self._within = [], None

    def hook(self, module: torch.nn.Module) -> None:
        """Register all hooks of a module, in front of all others; any that it has are taken away before."""
        self._unhook(module)
        handles = self._handles[module] = []
        handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
        handles.append(module.register_forward_hook(self._leave))
        handles.append(module.register_state_dict_pre_hook(self._fence))
        # Without the module, to which the public function binds it weakly: a shallow copy of a module shares its hooks.
        handles.append(module._register_load_state_dict_pre_hook(self._load, with_module=False))

    def hook_outermost(self, module: torch.nn.Module) -> None:
        """Hook errors of a module that is called outermost, unless it is compiled.

        Other modules get no such hook: Dynamo guards on its id, and would compile equal blocks one by one, the
        first eight.
        """
        if self._raised not in module._forward_hooks.values() and not module._compiled_call_impl:
            handle = module.register_forward_hook(self._raised, always_call=True)
            self._handles.setdefault(module, []).append(handle)

    def _unhook(self, module: torch.nn.Module) -> None:
        for handle in self._handles.pop(module, ()):
            handle.remove()

    def comes_first(self, module: torch.nn.Module) -> bool:
        """Return whether our hook is the first of a module, not counting hooks of other overlaps."""
        for hook in module._forward_pre_hooks.values():
            if hook is self._enter:
                return True
            if type(hook) is not hooks.Enter:
                break
        return False

    def unhooked(self, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Return the modules whose hooks are missing, or have others in front."""
        # Mostly there are none, and loops of C find that out.
        firsts = map(id, map(next, map(iter, map(_values, map(_pre_hooks, modules)))))  # ends early if one has none
        ends = map(operator.contains, map(_values, map(_forward_hooks, modules)), repeat(self._leave))
        if [*firsts] == [id(self._enter)] * len(modules) and all(ends):
            return []
        return [m for m in modules if not self.comes_first(m) or self._leave not in m._forward_hooks.values()]
