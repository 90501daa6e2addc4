"""Placements: where state is, and what a placement of your own is made from."""

from ..paging.pages import Layout
from ..system.virtual import device_page_limit
from ..system.warn import StateLost
from .arena import Arena
from .file import FileArena
from .managed import DriverManagedArena, ManagedArena
from .mapped import MappedArena
from .plain import DeviceArena, HostArena, PinnedArena

__all__ = [
    "Arena", "DeviceArena", "DriverManagedArena", "FileArena", "HostArena", "Layout", "ManagedArena", "MappedArena",
    "PinnedArena", "StateLost", "device_page_limit",
]  # fmt: skip
