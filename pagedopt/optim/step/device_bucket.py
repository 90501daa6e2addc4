"""A launch whose hyperparameters and step counts stay on the device, where capturable optimizers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...formats.floating import SINGLES
from ...formats.format import Format
from ...launch.device_step import SINGLE, DeviceStep
from ...paging.visits import WHOLE
from ...tables.columns import Tensors
from ...transports.choose import Kind
from ..state.group_options import seed_word
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead, NumberTensors, UnsavedStepCounts
from .bucket import Bucket
from .hyperparameters import number_of, scalars_of
from .members import Grads, Member
from .update import Update


class DeviceBucket(Bucket):
    """A :class:`Bucket` that reads nothing back from the device: the prologue of its rule computes what a set needs.

    Learning rates and betas that are tensors on the device are read there in each launch; what is a number on the host
    is copied there when it changes.
    """

    __slots__ = ("_device_step", "_group_of_row", "_plain_numbers", "_tensors", "_told")

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], shards: Grads) -> None:
        super().__init__(optimizer, members, shared, shards)
        table, device = self.sweep.table, self.sweep.device.index
        assert device is not None
        table.make_room(self.count)
        table.assign_sets(np.arange(self.count))
        counters = next((n.behind for _, n, _ in self._numbers if isinstance(n, UnsavedStepCounts)), None)
        self._device_step = DeviceStep(self.rule, device, table.host, len(optimizer.param_groups), counters)
        self.sweep.transport = self._device_step
        self._group_of_row = np.array(self._groups)
        self._plain_numbers = not any(n.is_inference() for n in self.numbers_of(members))
        #: Whether the device was told where step counts and other numbers of parameters lie: they stay there.
        self._told = False
        #: Tensors of hyperparameters, which the device reads.
        self._tensors: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def takes(member: Member, names: Sequence[str], shared: set[int]) -> bool:
        """Tell whether a parameter's numbers are where the device can count them: on it, as float32 or float64."""
        if not member.param.is_cuda:
            return False
        numbers, device = [member.entry[name] for name in names], member.param.device
        return all(n.device == device and n.dtype in SINGLES and n.data_ptr() not in shared for n in numbers)

    def compile(self, formats: tuple[Format, ...]) -> None:
        """Also compile the prologue."""
        super().compile(formats)
        self._device_step.compile()

    @staticmethod
    def _transport(optimizer: RuleOptimizer) -> Kind:
        return "memcpy"  # its table lies on the device, too: chunks are cut for that

    def prepare(
        self, optimizer: RuleOptimizer, tensors: Tensors, numbers: NumberTensors, ahead: Ahead, shards: Grads
    ) -> Update | None:
        """Do what :meth:`Bucket.prepare` does, without reading a number from the device."""
        seen = self._look(tensors, shards)
        table = self.sweep.table
        if len(table.absent) == self.count:
            return None
        self.tell(optimizer, None if self._told else numbers)
        written: NumberTensors
        if table.absent or self._own_counters or self._inference or not self._plain_numbers:
            away = set(table.absent)
            counted = [n for i, n in enumerate(numbers) if i % self.count not in away and not n.is_inference()]
            written = (*self._written(optimizer, tensors, table.absent), *counted)
        else:
            written = (*tensors[: self.count], *optimizer.store.versions.counters, *numbers)  # type: ignore[arg-type]
        plan = WHOLE if self.route is None else self.route.plan(table.host, table.absent)
        return Update(
            self.sweep, self.sweep.ready(plan), table.host.stamp, self.lists, tensors, seen, list(table.absent), (), (),
            self.route, plan, written,
        )  # fmt: skip

    def follow(self, optimizer: RuleOptimizer, tensors: Tensors) -> None:
        """Write today's addresses and hyperparameters into the table, for a graph in which its launch was captured.

        Step counts and other numbers of single parameters must be the captured tensors.

        Raises:
            ValueError, TypeError: a gradient does not fit its parameter, or has other strides.
            as :meth:`tell`.
        """
        seen, table = tensors[: 2 * self.count], self.sweep.table
        if not table.look(seen):
            self.sweep.take(self._cut(seen))
            table.let_go()
            table.remember(seen)
        self.tell(optimizer, None)

    def tell(self, optimizer: RuleOptimizer, numbers: NumberTensors | None) -> None:
        """Write what the prologue reads: constants, and addresses of hyperparameters, step counts and own numbers.

        Args:
            numbers: see :meth:`numbers_of`; None: they lie where the device was told.

        Raises:
            KeyError, ValueError, TypeError: see :func:`~.hyperparameters.scalars_of`.
            RuntimeError: a tensor is on another device, or not one number of float32 or float64.
        """
        step, table = self._device_step, self.sweep.table
        constants, tensors = np.zeros_like(step.constants), []
        sources = np.zeros((len(constants), len(self.rule.scalars)), np.uint64)
        for group in set(self._groups):
            for i, (name, value) in enumerate(self._values(optimizer, group)):
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    sources[group, i] = _address(value, name, self.sweep.device)
                else:
                    constants[group, i], sources[group, i] = value, step.constant_at(group, i)
        inputs = np.zeros_like(step.inputs)
        words = {group: 1 + int(seed_word(optimizer, group)) for group in set(self._groups)}
        inputs[:, 0] = [words[group] for group in self._groups]
        inputs[:, 2:] = sources[self._group_of_row]
        for name, each, where in self._numbers:
            column = 1 if name == "step" else 2 + self.rule.scalars.index(name)
            if numbers is None:
                inputs[:, column] = step.inputs[:, column]
            elif isinstance(each, UnsavedStepCounts):
                inputs[:, column] = [step.counter_at(row) for row in range(self.count)]
            else:
                inputs[:, column] = [_address(n, name, self.sweep.device) for n in numbers[where]]
        inputs[table.absent, 0] = 0
        if step.inputs.tobytes() != inputs.tobytes() or step.constants.tobytes() != constants.tobytes():
            step.inputs[:], step.constants[:], step.changed = inputs, constants, True
            table.host.stamp += 1  # a step that was prepared before has other numbers
        self._tensors, self._told = tuple(tensors), True
        step.reads_hyperparameters = bool(tensors)

    def _values(self, optimizer: RuleOptimizer, group: int) -> list[tuple[str, Any]]:
        """Return (name, number or tensor on the device) of each hyperparameter; 0 for those that parameters have.

        A tensor that the device cannot read is read here; in a capture :func:`_address` refuses it.
        """
        values = scalars_of(self.rule, optimizer.param_groups[group], optimizer.defaults, on_device=True)
        if not torch.cuda.is_current_stream_capturing():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and not _can_be_read(value, self.sweep.device):
                    values[name] = number_of(name, value)
        return [(name, values.get(name, self.rule.defaults.get(name, 0.0))) for name in self.rule.scalars]

    def differences(self, optimizer: RuleOptimizer) -> list[str]:
        """Return the names of hyperparameters that are not what the device was told."""
        step, found = self._device_step, []
        for group in sorted(set(self._groups)):
            for i, (name, value) in enumerate(self._values(optimizer, group)):
                if isinstance(value, torch.Tensor):
                    same = any(value is t for t in self._tensors)
                else:
                    same = np.float64(value).tobytes() == step.constants[group, i].tobytes()
                if not same:
                    found.append(f"{name} of group {group}")
        return found

    @property
    def is_told(self) -> bool:
        """Whether the device has, or will have, all that the table says."""
        return self._device_step.is_told(self.sweep.table.host)

    def publish(self, stream: int) -> bool:
        """Queue a copy of what has changed on a stream; see :meth:`DeviceStep.publish`."""
        return self._device_step.publish(self.sweep.table.host, stream)


def _can_be_read(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the prologue can read a number in ``tensor``."""
    return tensor.device == device and tensor.dtype in SINGLES and tensor.numel() == 1


def _address(tensor: torch.Tensor, name: str, device: torch.device) -> int:
    """Return the address of a number, with the mark of a float32."""
    if not _can_be_read(tensor, device):
        raise RuntimeError(
            f"{name} is a tensor of {tensor.numel()} elements, {tensor.dtype} on {tensor.device}; a step on {device} "
            "whose numbers stay there reads one element of float32 or float64 there"
        )
    return tensor.data_ptr() | (SINGLE if tensor.dtype is torch.float32 else 0)
