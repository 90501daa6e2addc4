"""Steps under the next forward or within the backward: ``attach``, and the fences of a step that may be queued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from ..common.kind_of import kind_of
from ..system.interrupts import Uninterrupted
from .capturing import CapturingOptimizer
from .locks import locked
from .overlap.everyone import wait_for_others
from .overlap.hooks import known
from .overlap.overlap import Overlap, OverlapReport
from .overlap.watch import Watch
from .overlap.within import UNCLIPPABLE, Within
from .plan import Launches, PreparedStep


class OverlappingOptimizer(CapturingOptimizer):
    """What an optimizer offers to those whose forward or backward should hide its step."""

    @locked
    def attach(self, model: torch.nn.Module, overlap: Literal["forward", "backward"] = "forward") -> None:
        """**Between step() and the next call of the model, weights are old: call wait() before you read them.**

        So it is with overlap="forward", of which all but the end of this text speaks.  From now on steps pass under the
        next forward of ``model``, bit for bit what they are without.  ``step()`` then queues the update and returns.
        Each module of the model waits, before it runs, for those of its parameters that are still to be updated, and
        the end of the model's forward waits for the rest.  The first forward with gradients is recorded, for modules
        that read parameters of others.  It needs state that is away (``device_budget`` below the whole), and saves time
        on a GPU only: on a CPU nothing runs at the same time.

        On a GPU the update starts with the next call of an attached model, or where it is waited for, and not in
        ``step()``: copies to the device are served in turn, so a batch that is copied in between would come behind all
        pages.  Copy batches before the model is called, not within.  ``torch.cuda.synchronize()`` does not wait for an
        update that has not started.

        Pages pass in the order in which the forward first uses their parameters.  ``device_budget`` keeps the state of
        the optimizer's first parameters on the device, mostly those of the first modules: with ``"64MiB"`` these have
        nothing to wait for.
        Pages with parameters that no attached model holds come first, and ``step()`` waits for them, with a warning.
        Modules that join a model later are hooked by the next ``step()`` or call of the model.

        Whatever else reads or writes parameters, gradients or state between :meth:`step` and the next call of the model
        has to call :meth:`wait` first.  Methods of this optimizer do it themselves, and so do ``state_dict``, ``to``,
        ``half`` and ``share_memory`` of the model.  Nothing notices reads without autograd (an average by hand,
        ``AveragedModel``, scripted functions), writes through ``.data`` or NumPy, and compiled code that was made for
        another instance of a class, without hooks; notes/hiding.md has the whole list.  Other writes, ``p.data = …``,
        and gradients of forwards that were not seen raise in :meth:`wait`, in a state dict or in the next step, once;
        :meth:`watch_reads` finds the line.  If the memory of a parameter, gradient or state was freed
        (``share_memory_()``, ``resize_()`` of a storage), nothing is launched, and state is damaged, too.

        Only calls of ``model`` itself count.  After ``model.features(x)`` or ``model.forward(x)`` steps are not
        queued.  If one is queued when such a method runs, the first child that it calls raises RuntimeError if a module
        around that child has parameters that are still to be updated: the method may have read them.  Attach the
        modules that are called.

        A step is carried out at once, and not queued, if no forward of the model was seen since the last step
        (``torch.compile``, CUDA graphs), if hooks run behind it, or if parameters are on several devices.  A warning
        says which, once.

        **With overlap="backward" a gradient is used, and given back, as soon as it is complete**, bit for bit as by a
        plain step.  All parameters of the optimizer are updated so, one or a page at a time, on a stream of their own,
        while the backward goes on; so not all gradients are in memory at once.  Pages of state that is away are fetched
        ahead, in the order in which gradients came before.  Hyperparameters are those at the first gradient.  Behind
        the backward ``.grad`` is None, and ``step()`` ends the step: it counts, and the current stream waits for all
        updates.  Gradients that were set by hand, or have another dtype than their parameter, get a plain step there;
        parameters without a gradient get none.  Whoever reads parameters between backward and ``step()`` calls
        :meth:`wait` before.  Room for state and slots is taken now.

        What has to look at all gradients first cannot be done so: clipping by a norm, a ``GradScaler``, a sum of
        several backwards, reductions over processes.  An error in the middle of a backward leaves its step open:
        ``step()`` ends it with the gradients that came.  ``torch.compile`` runs all hooks behind its whole backward,
        and so gives back no gradient earlier.

        Args:
            model: the module that is called in training.  Under the forward, several may be attached.
            overlap: ``"forward"`` or ``"backward"``; one of them at a time.

        Raises:
            ValueError: ``overlap`` is something else; the model or the optimizer is attached; the model is, or has
                within it, a ``DataParallel``, a scripted module, or one that is sharded by FSDP; no hook has been set.
                With ``"backward"`` also: a ``DistributedDataParallel``; parameters on several devices, or twice in the
                optimizer; ``max_grad_norm`` is set; a group is ``fused`` or ``capturable``; a ``GradScaler`` has scaled
                a step; no parameter of the optimizer is in the model, or one is attached to another optimizer.
            TypeError: the model is no module.
            MemoryError, torch.OutOfMemoryError: with ``"backward"``, there is no room for state.
            RuntimeError: with ``"backward"``, a captured step is alive.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0)
            >>> optimizer.attach(model)
            >>> for batch in batches:
            ...     loss = model(batch).mean()  # hides what is left of the last step
            ...     loss.backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> with optimizer.waited():  # nothing notices that the average reads the parameters
            ...     average.update_parameters(model)

            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0, state_format="int8")
            >>> optimizer.attach(model, overlap="backward")
            >>> for batch in batches:
            ...     model(batch).mean().backward()  # updates, and leaves no gradient
            ...     optimizer.step()
        """
        if overlap not in ("forward", "backward"):
            raise ValueError(f"overlap is {overlap!r}, and there are 'forward' and 'backward'")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach() takes a torch.nn.Module, and not {kind_of(model)}")
        if self._within is not None or (self._overlap is not None and overlap == "backward"):
            under = "forward" if self._within is None else "backward"
            raise ValueError(f"this optimizer is attached with overlap={under!r}; detach() it before")
        if overlap == "backward":
            self._refuse_moves("attach(overlap='backward')")
            with Uninterrupted(gives_way=True):
                self._within = Within(self, model)
            return
        overlap_of_all = self._overlap or Overlap(self)
        overlap_of_all.attach(model)
        self._overlap = overlap_of_all

    @locked
    def detach(self) -> None:
        """Undo :meth:`attach`, of all models."""
        within, self._within = self._within, None
        if within is not None:
            within.detach()
        overlap, self._overlap = self._overlap, None  # first: if an interrupt leaves hooks behind, they are dead
        if overlap is not None:
            overlap.detach()
            self.first_use = {}
            self._launches = None
            overlap.tell_misuse()

    @locked
    def wait(self) -> None:
        """Let the current stream (on a CPU, the caller) wait until the last step is done.

        To be called before parameters, gradients or state are read or written behind a step that may be queued; see
        :meth:`attach`.  What it waits for is not hidden.  Without a queued step it does nothing.  Between a backward
        that updates and :meth:`step` it waits for what has been updated.

        Raises:
            RuntimeError: something was done to parameters, gradients or state before this, and it was not waited for.
        """
        self._tell_misuse()
        if self._within is not None:
            self._within.wait()

    @contextlib.contextmanager
    def waited(self) -> Iterator[None]:
        """A ``with`` block that reads or writes parameters: :meth:`wait` before it, and nothing behind it."""
        self.wait()
        yield

    def watch_reads(self) -> Watch:
        """Return a ``with`` block in which a line that forgets :meth:`wait` raises RuntimeError, for tests.

        It raises where the line is, and so before the line does harm.  The message names the line and the parameter: it
        is read or written while its update is queued, or its gradient is written.  A view (``detach``, ``t``, ``view``)
        reads nothing.  Not found are kernels that take ``data_ptr()``, and other threads.

        Raises:
            RuntimeError: no model is attached.

        Example:
            >>> with optimizer.watch_reads():
            ...     train_an_epoch()
        """
        if self._overlap is None:
            raise RuntimeError("watch_reads() finds who reads parameters too early: attach() a model first")
        return Watch(self._overlap)

    @locked
    def overlap_report(self) -> OverlapReport:
        """Return, since :meth:`attach`, counts of launches hidden and waited for, and of steps that were not queued.

        All are zero if no model is attached.  See :class:`OverlapReport`.
        """
        return OverlapReport() if self._overlap is None else self._overlap.report

    def _tell_misuse(self) -> None:
        if self._overlap is not None:
            self._overlap.tell_misuse()

    @property
    def unclippable(self) -> str:
        return "" if self._within is None else UNCLIPPABLE

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        if not set_to_none:  # else a queued step keeps the gradients
            self.wait()
        super().zero_grad(set_to_none)

    def _take(self, step: PreparedStep) -> Launches:
        """Take a prepared step, at once or queued."""
        if known:
            wait_for_others(step, self._overlap)
        return step.run() if self._overlap is None else self._overlap.take(step)
