"""Placements: where state is, and what a placement of your own is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.names import attach

if TYPE_CHECKING:
    from ..paging.pages import Layout as Layout
    from ..system.virtual import device_page_limit as device_page_limit
    from ..system.warn import StateLost as StateLost
    from .arena import Arena as Arena
    from .file import FileArena as FileArena
    from .managed import DriverManagedArena as DriverManagedArena
    from .managed import ManagedArena as ManagedArena
    from .mapped import MappedArena as MappedArena
    from .plain import DeviceArena as DeviceArena
    from .plain import HostArena as HostArena
    from .plain import PinnedArena as PinnedArena
else:  # not for type checkers: with __getattr__ they would accept any name
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..paging.pages": ("Layout",),
            "..system.virtual": ("device_page_limit",),
            "..system.warn": ("StateLost",),
            ".arena": ("Arena",),
            ".file": ("FileArena",),
            ".managed": ("DriverManagedArena", "ManagedArena"),
            ".mapped": ("MappedArena",),
            ".plain": ("DeviceArena", "HostArena", "PinnedArena"),
        },
    )
