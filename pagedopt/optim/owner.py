"""What the rooms behind an optimizer know of it: members, launches, loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ..formats.floating import StateFormat
from ..formats.format import Format
from ..placements.report import MemoryReport
from ..placements.store import Store
from ..planning.affordable import Affordable
from ..rules import Rule
from ..transports.choose import Kind

Group = dict[str, Any]


class Owner(Protocol):
    """A :class:`~pagedopt.PagedOptimizer`; its docstrings say what each of these is."""

    param_groups: list[Group]
    state: defaultdict[torch.Tensor, Any]
    defaults: dict[str, Any]
    store: Store
    affordable: Affordable
    state_format: StateFormat
    blocks: int | None
    transport: Kind
    damaged: str
    numbers: frozenset[str]

    @property
    def has_step(self) -> bool: ...

    @property
    def initial(self) -> Mapping[str, float | str]: ...

    @property
    def fixed_dtypes(self) -> tuple[str, ...]: ...

    @property
    def rounded_on_cuda(self) -> tuple[str, ...]: ...

    def rule_of(self, group: Group, /) -> Rule: ...

    def state_names(self, group: Group, /) -> tuple[str, ...]: ...

    def format_of(self, name: str, p: torch.Tensor, /) -> Format: ...

    def memory_report(self) -> MemoryReport: ...

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], /) -> RemovableHandle: ...

    def register_load_state_dict_post_hook(
        self, hook: Callable[..., None], prepend: bool = False
    ) -> RemovableHandle: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, state: dict[str, Any], /) -> None: ...


def places(optimizer: Owner) -> Iterator[tuple[int, Group, torch.Tensor]]:
    """Every place in which a parameter stands: (number of the group, the group, the parameter)."""
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield number, group, p
