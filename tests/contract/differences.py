"""Where ours is not as torch's, with the reason: all that differs is listed, and all that is listed differs."""

from __future__ import annotations

import inspect

import torch

from tests.specs import SPECS, Difference

#: Classes that replace one of torch's.
_TORCHS = tuple(name for name, spec in SPECS.items() if spec.entry.torch)


def _with(argument: str) -> tuple[str, ...]:
    """Those whose torch's class takes an argument."""
    return tuple(name for name in _TORCHS if argument in inspect.signature(SPECS[name].reference).parameters)


#: Classes whose torch's step views complex numbers as real ones.
_AS_REAL = tuple(name for name, spec in SPECS.items() if not spec.conjugated)
#: Classes whose step decays weights by subtracting a part of them.
_DECOUPLED = tuple(name for name, spec in SPECS.items() if spec.decoupled)
#: Classes whose torch's step averages gradients by ``lerp_``, which refuses mixed dtypes; those that add decay to them.
_LERP = tuple(name for name in _TORCHS if {*SPECS[name].entry.optimizer.fixed_dtypes} & {*SPECS[name].cases[0].names})
_LERP_OF_SUMS = tuple(name for name in _LERP if name not in _DECOUPLED)

#: Classes whose torch's class makes state at construction.
_EARLY = tuple(name for name in _TORCHS if SPECS[name].reference([torch.nn.Parameter(torch.ones(1))]).state)

#: Dtypes of a gradient and of its narrower parameter.
_WIDER = (("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32"))

_NO_GRAPH = "`differentiable=True` is refused: a step of one launch has no graph to differentiate through."

#: Where hyperparameters are tensors of one element that have dimensions, and of which optimizers.
_VALUES = (
    "lr=torch.float32 [0.5]*", "lr=torch.float32 [[0.5]]*", "lr=torch.float32 [0.25]*",
    "betas=tuple(torch.float32 [0.5], torch.float32 0.5)*", "betas=tuple(torch.float32 [0.25]*",
)  # fmt: skip
_OF_ONE: tuple[tuple[str, str | tuple[str, ...], tuple[str, ...]], ...] = (
    ("odd values at construction", _VALUES, _TORCHS),
    ("values changed between steps", _VALUES, _TORCHS),
    ("a tensor that is the learning rate", "torch.float32 [*", _TORCHS),
    ("betas that are tensors", "1-dim*", _with("betas")),
)

DIFFERENCES: tuple[Difference, ...] = (
    *(each for spec in SPECS.values() for each in spec.differences),
    # Parameters and gradients.
    Difference(
        "beyond", "a step that is refused", "all is as it was",
        "A step that refuses one parameter has changed nothing: no parameter, state or step count. torch's loop has "
        "updated those before it, and counted.",
    ),
    Difference(
        "beyond", "complex between steps", "conjugated*",
        "A parameter that is a conjugated view is updated; torch raises RuntimeError, as it cannot view it as real.",
        _AS_REAL,
    ),
    Difference(
        "beyond", "of complex numbers", "conjugated*",
        "A conjugated gradient is accepted; torch raises RuntimeError, as it cannot view it as real.",
        tuple(name for name in _AS_REAL if SPECS[name].views_gradients),
    ),
    Difference(
        "beyond", "laid out otherwise", "strides of state",
        "State is laid out as its parameter, as torch's other optimizers lay it out, so that one launch reads both in "
        "order; torch's SGD keeps the layout of the first gradient. The values are the same.",
        ("PagedSGD",),
    ),
    Difference(
        "refused", "sparse without state", "a step",
        "Sparse gradients are refused with RuntimeError by every Paged class, and nothing is updated; torch's SGD "
        "accepts them without momentum and weight decay.",
        ("PagedSGD",), error=RuntimeError,
    ),
    *(
        Difference(
            "differs", scenario, labels,
            "An infinite parameter becomes NaN in a step that decays weights, as in torch's fused kernel for CUDA: its "
            "share is subtracted from it. torch's loop multiplies it, and it stays infinite.",
            _DECOUPLED,
        )
        for scenario, labels in {
            "extreme parameters": "infinite parameters*",
            "odd values at construction": ("lr=inf: trained", "weight_decay=inf: trained"),
        }.items()
    ),
    *(
        Difference(
            "beyond", scenario, labels,
            "A gradient of another dtype is accepted, as near to float64 as the dtypes allow; torch raises "
            "RuntimeError.",
            optimizers,
        )
        for scenario, labels, optimizers in (
            ("of another dtype", "*", tuple(name for name in _LERP if name in _DECOUPLED)),
            # The sum of a gradient and a wider parameter is as wide as that.
            ("of another dtype", tuple(f"{grad} of {param}*" for grad, param in _WIDER), _LERP_OF_SUMS),
            ("changed with its gradient left", ("double", "double: *"), _LERP_OF_SUMS),
            ("complex between steps", "complex128, the gradient left*", _LERP_OF_SUMS),
        )
    ),
    Difference(
        "refused", "broadcast over a larger parameter",
        ("(1,) to (4,)", "() to (3,)", "() to (1,)", "(1, 3) to (5, 3)"),
        "A parameter that has grown while its state is as it was is refused with RuntimeError, as torch's SGD does "
        "where it has momentum; torch's AdamW broadcasts state and gradient where it can.",
        ("PagedAdamW",), error=RuntimeError,
    ),
    Difference(
        "beyond", "of another dtype",
        tuple(f"{grad} of {param}: dtypes of state" for grad, param in _WIDER),
        "State is made in the parameter's dtype, as torch's other optimizers make it and as the estimate says, or "
        "in the state_format asked for; torch's SGD keeps that of the first gradient.",
        ("PagedSGD",),
    ),
    *(
        Difference(
            "differs", scenario, labels,
            "State is made in the first step in which a parameter has a gradient, as by torch's other optimizers; "
            "torch's Adagrad makes it at construction.",
            _EARLY,
        )
        for scenario, labels in {
            "parameters that are never trained": "trained", "state as a mapping": "before",
            "copies": "0 steps, the original waited*",
            "zero grad": ("by default: after it", "to None: after it", "to zeros: after it"),
            "a module cast before the first step": ("half", "bfloat16", "double"),
        }.items()
    ),
    # Hyperparameters.
    Difference(
        "refused", "differentiable",
        tuple(
            f"{{'foreach': {each}{fused}}}"
            for each in (None, False, True)
            for fused in ("", ", 'fused': None", ", 'fused': False")
        ),
        _NO_GRAPH, _TORCHS, error=ValueError,
    ),
    Difference(
        "refused", "flags set between steps", ("{'differentiable': True}", "{'differentiable': True}: trained"),
        _NO_GRAPH, tuple(name for name in _TORCHS if name != "PagedSGD"),
    ),
    Difference(
        "refused", "groups that are refused", ("an option of all", "an option of all: groups"),
        "A group with another value of an option that holds for all parameters of an optimizer (`device_budget`) is "
        "refused with ValueError, as it would have no effect; torch accepts any key.",
    ),
    Difference(
        "beyond", "flags set between steps",
        tuple(f"{{{also}'fused': True}}{end}" for also in ("", "'foreach': True, ") for end in ("", ": trained")),
        "With fused set in a group, step counts stay on the CPU if they are there, and the step is fused; torch's "
        "kernel refuses them with RuntimeError.",
        tuple(name for name in _with("fused") if SPECS[name].entry.optimizer.has_step), devices=("cuda",),
    ),
    Difference(
        "beyond", "flags with tensors set between steps",
        ("{'foreach': True, 'fused': None}*", "{'foreach': True, 'fused': False}*"),
        "A tensor lr put into a group with foreach=True is followed; torch's step raises RuntimeError. Its "
        "constructor raises ValueError, as ours does.",
        ("PagedAdamW", "PagedAdam"),
    ),
    *(
        Difference(
            "beyond", "deleted from a group", f"without {name}",
            "Groups without `foreach`, `fused` or `decoupled_weight_decay`, as older versions of torch wrote them, are "
            "stepped; torch raises KeyError.",
            optimizers,
        )
        for name, optimizers in {
            "foreach": _TORCHS, "fused": _with("fused"),
            "decoupled_weight_decay": tuple(
                name for name in _TORCHS if "decoupled_weight_decay" in SPECS[name].entry.optimizer.extra_defaults
            ),
        }.items()
    ),
    Difference(
        "refused", "values changed between steps", ("lr=torch.float32 [0.5, 0.25]", "lr=torch.float32 []"),
        "A tensor lr that has not one element, put into a group, is refused with RuntimeError, as torch's AdamW "
        "and RAdam do; torch's others raise TypeError.",
        tuple(name for name in _TORCHS if name not in ("PagedAdamW", "PagedRAdam")), error=RuntimeError,
    ),
    *(
        Difference(
            "beyond", scenario, labels,
            "A tensor of one element is its number, whatever its dimensions; older versions of torch refuse one with "
            "dimensions in a step, with TypeError.",
            optimizers, older=True,
        )
        for scenario, labels, optimizers in _OF_ONE
    ),
    # Training loops.
    Difference(
        "differs", "a scaled loss", tuple(f"{{'fused': True}}, step {step}: gradients" for step in (0, 3, 4, 6)),
        "With `fused` a step divides by the scale what it reads, and gradients stay scaled: 4 bytes fewer for each "
        "float32 parameter. torch's fused step writes the unscaled ones back.",
        _with("fused"),
    ),
    Difference(
        "beyond", "gradients off", "inference_mode, first=True*",
        "State that is made in torch.inference_mode is followed outside of it, too; torch's raises RuntimeError there.",
        tuple(name for name in SPECS if name not in _EARLY),
    ),
    Difference(
        "refused", "devices that are not meant", "meta*",
        "Parameters on meta are refused at construction and by add_param_group: a kernel has nothing to write to. "
        "torch accepts them, and its steps do nothing.",
        error=ValueError,
    ),
    Difference(
        "refused", "tensors without memory", "fake: at construction",
        "Tensors of FakeTensorMode are refused at construction: a kernel has nothing to write to; "
        "pagedopt.estimate() says what state would take.",
        error=ValueError,
    ),
    Difference(
        "refused", "tensors without memory", "fake: a first step",
        "A step that has to make state in FakeTensorMode is refused with RuntimeError, and changes nothing; torch's "
        "stores FakeTensors as the state of real parameters.",
        error=RuntimeError,
    ),
    # Objects.
    Difference(
        "refused", "state that autograd has saved", ("written", "stepped"),
        "All state of an optimizer has one version counter, raised by one call: autograd regards saved "
        "state as changed (RuntimeError) when other state of the optimizer is.",
        error=RuntimeError,
    ),
    # Checkpoints.
    Difference(
        "refused", "complex state into real parameters", "loading",
        "State of complex parameters for real ones is refused with ValueError; torch takes the real parts, and warns.",
        error=ValueError,
    ),
    Difference(
        "beyond", "float32 state that a state format keeps", "state *",
        "With `state_format=\"float32\"` loaded float32 state of bfloat16 parameters stays float32; torch rounds it.",
    ),
    Difference(
        "refused", "float64 state into float32 parameters", "loading",
        "float64 state for float32 parameters is refused, with the formats that store or round it; torch rounds.",
        error=ValueError,
    ),
    Difference(
        "beyond", "what was loaded is left alone", "the dict is as it was",
        "Loading copies values; torch trains on in the tensors of the dict, and changes them.",
    ),
    # What it says of itself.
    Difference(
        "beyond", "its text", "*",
        "`repr` has a line on state after the groups: bytes by place, the placement and the budget.",
    ),
)  # fmt: skip


def listed(scenario: str, label: str, optimizer: str, device: str) -> Difference | None:
    """The entry for one point of a transcript."""
    for each in DIFFERENCES:
        labels = (each.labels,) if isinstance(each.labels, str) else each.labels
        named = any(one == label or (one.endswith("*") and label.startswith(one[:-1])) for one in labels)
        meant = optimizer in (each.optimizers or (optimizer,)) and device in each.devices
        if each.scenario == scenario and named and meant:
            return each
    return None
