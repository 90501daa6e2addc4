"""What a kernel is made from: the update of one element, as text for each machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class KernelRule(Protocol):
    """What kernels see of a rule (:class:`pagedopt.rules.Rule` is one); kernels are kept by it, so it must be hashable.

    Attributes:
        name: for people.
        functor: the name of the struct in :meth:`cuda_source`.
        uniform_count: how many numbers it receives for one set of hyperparameters.
        reads, writes: which lists it reads, and which it overwrites.
    """

    @property
    def name(self) -> str: ...

    @property
    def functor(self) -> str: ...

    @property
    def uniform_count(self) -> int: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def writes(self) -> tuple[int, ...]: ...

    def check(self) -> None:
        """
        Raises:
            TypeError: it is no longer what it was when its text was made.
        """

    def cuda_source(self) -> str:
        """A struct with ``apply(in, u, out)`` on elements of one type, and what it reads and writes."""

    def numba_lines(self, load: Sequence[str], store: Sequence[str]) -> list[str]:
        """Python statements for one element; ``load[i]`` reads list i, ``store[i]`` stores its ``{}``."""

    def __hash__(self) -> int: ...
