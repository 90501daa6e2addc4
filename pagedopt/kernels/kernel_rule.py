"""The interface of rules to kernels: the update of one element, as CUDA and as Python text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class KernelRule(Protocol):
    """A rule as kernels see it (:class:`pagedopt.rules.Rule` is one); hashable, as the key of kernel caches.

    Attributes:
        name: for people.
        functor, prologue: the names of the structs in :meth:`cuda_source` and :meth:`prologue_source`.
        uniform_count: numbers per set of hyperparameters.
        reads, writes: indices of the lists it reads, and of those it overwrites.
    """

    @property
    def name(self) -> str: ...

    @property
    def functor(self) -> str: ...

    @property
    def prologue(self) -> str: ...

    @property
    def uniform_count(self) -> int: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def writes(self) -> tuple[int, ...]: ...

    def cuda_source(self) -> str:
        """Return a struct with ``apply(in, u, out)`` for one element, and masks of the lists it reads and writes."""

    def prologue_source(self) -> str:
        """Return a struct with ``compute(in, u)`` for one set of hyperparameters, and what ``prologue.cu`` asks for."""

    def numba_lines(
        self, load: Sequence[str], store: Sequence[str], stored: Sequence[Callable[[str], str]] = ()
    ) -> list[str]:
        """Return Python statements for one element.

        ``load[i]`` reads from list i, ``store[i]`` stores ``{}`` there, ``stored[i]`` makes the text of a number that
        of the number as list i has it.
        """

    def __hash__(self) -> int: ...
