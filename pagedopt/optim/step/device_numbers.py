"""Hyperparameters and step counts of one launch, which stay on the device, as in capturable optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...formats.floating import SINGLES
from ...launch.device_step import SINGLE, DeviceStep
from ...launch.sweep import Sweep
from ..state.group_options import seed_word
from ..state.rule_optimizer import RuleOptimizer, number_names
from ..state.scalar_state import Ahead, NumberTensors, UnsavedStepCounts
from .host_numbers import Numbers, groups_of, number_states
from .hyperparameters import number_of, scalars_of
from .members import Member


class DeviceNumbers:
    """Numbers that the host never reads back: the prologue of the rule computes what a set needs.

    Learning rates and betas that are tensors on the device are read there in each launch; numbers on the host are
    copied there when they change.  The table gets a set for each row, and lies in device memory.

    Args:
        members, shared, sweep: as of :class:`HostNumbers`.
    """

    __slots__ = (
        "_all_writable", "_device_step", "_group_of_row", "_groups", "_rule", "_states", "_sweep", "_tensors", "_told",
        "takes_tensors",
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], sweep: Sweep) -> None:
        table, index = sweep.table, sweep.device.index
        assert index is not None
        self._rule, self._sweep, self._groups = sweep.rule, sweep, groups_of(members)
        self._states = number_states(optimizer, members, shared)
        self.takes_tensors = any(each.takes_tensors for _, each, _ in self._states)
        table.make_room(len(members))
        table.assign_sets(np.arange(len(members)))
        counters = next((n.behind for _, n, _ in self._states if isinstance(n, UnsavedStepCounts)), None)
        groups = len(optimizer.param_groups)
        self._device_step = DeviceStep(self._rule, index, table.host, groups, counters, sweep.factor)
        sweep.transport = self._device_step
        self._group_of_row = np.array(self._groups)
        names = number_names(optimizer, self._rule)
        self._all_writable = not any(m.entry[name].is_inference() for name in names for m in members)
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

    def compile(self) -> None:
        """Compile (or load) the prologue now."""
        self._device_step.compile()

    def prepare(self, optimizer: RuleOptimizer, numbers: NumberTensors, ahead: Ahead) -> Numbers:
        """Do what :meth:`HostNumbers.prepare` does, without reading a number from the device."""
        self.tell(optimizer, None if self._told else numbers)
        absent = self._sweep.table.absent
        if absent or not self._all_writable:
            away, count = set(absent), len(self._groups)
            numbers = [n for i, n in enumerate(numbers) if i % count not in away and not n.is_inference()]
        return Numbers(written=numbers)

    def tell(self, optimizer: RuleOptimizer, numbers: NumberTensors | None) -> None:
        """Write what the prologue reads: constants, and addresses of hyperparameters, step counts and own numbers.

        Args:
            numbers: see :meth:`Bucket.numbers_of`; None: they lie where the device was told.

        Raises:
            KeyError, ValueError, TypeError: see :func:`~.hyperparameters.scalars_of`.
            RuntimeError: a tensor is on another device, or not one number of float32 or float64.
        """
        step, table, device = self._device_step, self._sweep.table, self._sweep.device
        constants, tensors = np.zeros_like(step.constants), []
        sources = np.zeros((len(constants), len(self._rule.scalars)), np.uint64)
        for group in set(self._groups):
            for i, (name, value) in enumerate(self._values(optimizer, group)):
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    sources[group, i] = _address(value, name, device)
                else:
                    constants[group, i], sources[group, i] = value, step.constant_at(group, i)
        inputs = np.zeros_like(step.inputs)
        words = {group: 1 + int(seed_word(optimizer, group)) for group in set(self._groups)}
        inputs[:, 0] = [words[group] for group in self._groups]
        inputs[:, 2:] = sources[self._group_of_row]
        for name, each, where in self._states:
            column = 1 if name == "step" else 2 + self._rule.scalars.index(name)
            if numbers is None:
                inputs[:, column] = step.inputs[:, column]
            elif isinstance(each, UnsavedStepCounts):
                inputs[:, column] = [step.counter_at(row) for row in range(len(self._groups))]
            else:
                inputs[:, column] = [_address(n, name, device) for n in numbers[where]]
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
        values = scalars_of(self._rule, optimizer.param_groups[group], optimizer.defaults, on_device=True)
        if not torch.cuda.is_current_stream_capturing():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and not _can_be_read(value, self._sweep.device):
                    values[name] = number_of(name, value)
        return [(name, values.get(name, self._rule.defaults.get(name, 0.0))) for name in self._rule.scalars]

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
        return self._device_step.is_told(self._sweep.table.host)

    def publish(self, stream: int) -> bool:
        """Queue a copy of what has changed on a stream; see :meth:`DeviceStep.publish`."""
        return self._device_step.publish(self._sweep.table.host, stream)


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
