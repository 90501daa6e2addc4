"""Operations that an injection hits, and the verdict: unchanged, complete, or refused in words; never a mixture."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stand_ins import refusal

from tests.specs import ADAMW, BY_STATE
from tests.world import QUICK, Params, give, parameter, record, steps

Values = dict[tuple[Any, str], Any]


class Clipping(torch.optim.AdamW):
    """torch's, behind ``clip_grad_norm_``."""

    def __init__(self, params: Any, max_grad_norm: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.max_grad_norm = max_grad_norm

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.max_grad_norm)
        return super().step(closure)


#: With ``fused`` step counts lie on the parameter's device.
CASES = {
    **BY_STATE,
    "fused": dataclasses.replace(ADAMW.cases[0], name="fused", options={**ADAMW.hyper, "fused": True}),
    "clipped": dataclasses.replace(
        ADAMW.cases[0], name="clipped", theirs=Clipping, options={**ADAMW.hyper, "max_grad_norm": 2.0}
    ),
}
#: Elements of the parameter that spans pages.
LARGE = {"cpu": 36_000, "cuda": 1_200_000}


@dataclass(frozen=True)
class Scene:
    """What is done to which optimizer whose state is where."""

    operation: str
    placement: str
    case: str = "adamw"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.operation}-{self.placement}-{self.case}"


class Stage:
    """An optimizer, ours or torch's, that is ready for its operation.  Two dtypes take two launches."""

    def __init__(self, scene: Scene, theirs: bool = False) -> None:
        self.scene, self.case, self.theirs = scene, CASES[scene.case], theirs
        shapes = [(LARGE[scene.device],), (13, 18), (70,)]
        kinds = (torch.float32, torch.float32, torch.float64)
        self.params: Params = [parameter(shapes[i], i, scene.device, kind) for i, kind in enumerate(kinds)]
        self.optimizer: Any = None
        self.left: list[torch.Tensor] = []
        self.act = OPERATIONS[scene.operation](self)

    def construct(self) -> None:
        groups = [{"params": self.params[:1]}, {"params": self.params[1:], "lr": 0.07}]
        self.optimizer = self.case.make(self.theirs, groups, **options(self.scene))

    def begin(self, before: int = 2) -> None:
        self.construct()
        self.train(before, 0)

    def train(self, count: int, first: int) -> None:
        steps(self.optimizer, self.params, count, first)

    def ready(self, step: int = 2) -> Callable[[], Any]:
        """Gradients are there; the step itself."""
        give(self.params, step)
        return lambda: self.optimizer.step()

    def values(self) -> Values:
        """Copies of parameters and state, and the hyperparameters of every group."""
        found: Values = {(i, "param"): p.detach().clone() for i, p in enumerate(self.params)}
        if self.optimizer is not None:
            for i, p in enumerate(self.params):
                for name, value in self.optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[i, name] = value.detach().clone()
            for i, group in enumerate(self.optimizer.param_groups):
                found[i, "group"] = group["lr"], group["weight_decay"], len(group["params"])
        return found

    @staticmethod
    def expected(scene: Scene) -> object:
        """What should come of it; what is compiled and loaded once is then no part of the act."""
        return expected(scene)

    def verdict(self, may_be_damaged: bool, torn: bool = False) -> str:
        """ "before", "after" or "damaged"; fails if it is anything else, or if the next steps are wrong.

        Args:
            torn: a second interrupt may have come between the word that something begins and its beginning.
        """
        before, after = expected(self.scene)
        if self.optimizer is None:
            self.construct()
        opt = self.optimizer
        if "damaged" in refusal(opt.state_dict):
            assert may_be_damaged, "one signal has damaged the state"
            unchanged = is_same(self.values(), before.values, self.case.has_step)
            assert torn or not unchanged, "it says that it is damaged, and nothing has changed"
            _assert_refused_and_healed(self, after)
            return "damaged"
        now = self.values()
        found = [way for way in (after, before) if is_same(now, way.values, self.case.has_step)]
        assert found, f"neither unchanged nor complete: {_differences(now, before.values, after.values)}"
        nbytes = sum(v.nbytes for entry in opt.state.values() for name, v in entry.items() if name != "step")
        assert sum(opt.memory_report().by_place.values()) >= nbytes
        self.train(2, 10)
        assert is_same(self.values(), found[0].later, True), "the next steps are wrong"
        _assert_moves_lose_nothing(self, found[0])
        return "after" if found[0] is after else "before"


Operation = Callable[[Stage], Callable[[], Any]]


def options(scene: Scene) -> dict[str, Any]:
    half = 4 * LARGE[scene.device] * len(CASES[scene.case].names) // 2
    budget = {"resident": None, "spilled": 0, "half": half}[scene.placement]
    if budget is None:
        return {}
    return {"device_budget": budget}


# --- operations: each prepares a stage and returns what is to be done ------------------------------------------------


def step(stage: Stage, before: int = 0) -> Callable[[], Any]:
    stage.begin(before)
    return stage.ready(before)


def quick_step(stage: Stage) -> Callable[[], Any]:
    """One compiled call, whose learning rate is a new one."""
    stage.begin(8)
    assert stage.theirs or not QUICK or record(stage.optimizer) is not None
    for group in stage.optimizer.param_groups:
        group["lr"] *= 0.5
    return stage.ready(8)


def step_with_group(stage: Stage) -> Callable[[], Any]:
    add_group(stage)()
    return stage.ready()


def add_group(stage: Stage) -> Callable[[], Any]:
    stage.begin()
    stage.params.append(parameter((300, 50), 5, stage.scene.device))
    return lambda: stage.optimizer.add_param_group({"params": stage.params[3:], "lr": 0.02})


def step_after_a_cast(stage: Stage) -> Callable[[], Any]:
    """``module.double()`` between two steps: launches are made anew, state stays what it is."""
    stage.begin()
    for p in stage.params:
        p.data = p.data.double()
    return stage.ready()


def step_after_a_move(stage: Stage) -> Callable[[], Any]:
    """``.data`` lies elsewhere: the table is written anew, and nothing where the parameters were."""
    stage.begin()
    stage.left = [p.data for p in stage.params]  # alive: who writes there does no harm but this
    for p in stage.params:
        p.data = p.data.clone()
    return stage.ready()


def step_with_other_counts(stage: Stage) -> Callable[[], Any]:
    """Parameters of one launch begin to differ in their own numbers: it needs room for more sets of them."""
    stage.params += [parameter((40 + i,), 60 + i, stage.scene.device) for i in range(4)]
    stage.begin()
    for i, p in enumerate(stage.params):
        stage.optimizer.state[p]["step"].fill_(3 + i)
    return stage.ready()


@functools.cache
def other_training(scene: Scene) -> dict[str, Any]:
    """A checkpoint of torch's optimizer with other values everywhere."""
    stage = Stage(Scene("construct", "resident", scene.case, scene.device), theirs=True)
    stage.construct()
    stage.train(4, 100)
    for group in stage.optimizer.param_groups:
        group["lr"] /= 2
    return copy.deepcopy(stage.optimizer.state_dict())


def load(stage: Stage, before: int = 0) -> Callable[[], Any]:
    stage.begin(before)
    saved = copy.deepcopy(other_training(stage.scene))  # torch's optimizer goes on with the very tensors
    return lambda: stage.optimizer.load_state_dict(saved)


def _move(how: Callable[[Any], Any], first: Callable[[Any], Any] = lambda _: None) -> Operation:
    def prepare(stage: Stage) -> Callable[[], Any]:
        stage.begin()
        first(stage.optimizer)
        return lambda: how(stage.optimizer)

    return prepare


OPERATIONS: dict[str, Operation] = {
    "construct": lambda stage: stage.construct,
    "first step": step,
    "step": functools.partial(step, before=2),
    "quick step": quick_step,
    "step with group": step_with_group,
    "step after a cast": step_after_a_cast,
    "step after a move": step_after_a_move,
    "step with other counts": step_with_other_counts,
    "add group": add_group,
    "load fresh": load,
    "load used": functools.partial(load, before=2),
    "budget up": _move(lambda o: o.set_device_budget(None)),
    "budget down": _move(lambda o: o.set_device_budget(0), first=lambda o: o.set_device_budget(None)),
    "spill": _move(lambda o: o.spill()),
    "unspill": _move(lambda o: o.unspill(), first=lambda o: o.spill()),
    "deepcopy": _move(copy.deepcopy),
    "pickle": _move(pickle.dumps),
    "state_dict": _move(lambda o: o.state_dict()),
}
_AWAY, _HALF = ("spilled", "half"), ("half",)
PLACED = {"budget up": _AWAY, "budget down": _AWAY, "spill": _HALF, "unspill": _HALF}
#: State is resident.
HERE = {"quick step": ("resident",)}
#: What torch's AdamW refuses.
OF_SGD = ("step after a cast",)


def scenes(device: str = "cpu") -> list[Scene]:
    everywhere = ("resident", "spilled", "half")
    of_adamw = [operation for operation in OPERATIONS if operation not in OF_SGD]
    chosen = [("adamw", operation, {**PLACED, **HERE}.get(operation, everywhere)) for operation in of_adamw]
    others = [("momentum", operation) for operation in ("first step", "step", *OF_SGD)]
    others += [("clipped", operation) for operation in ("first step", "step")]
    if device == "cuda":
        others += [("fused", operation) for operation in ("first step", "step", "load used")]
    chosen += [(case, operation, everywhere[:2]) for case, operation in others]
    return [Scene(operation, placement, case, device) for case, operation, places in chosen for placement in places]


# --- what should come of it ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Values at one point, and two steps later; a checkpoint of that point."""

    values: Values
    later: Values
    saved: dict[str, Any]


@functools.cache
def expected(scene: Scene) -> tuple[Way, Way]:
    """Without the operation, and with it; torch's optimizer has the same."""
    ways = []
    for done in (False, True):
        stage = Stage(scene)
        if done:
            stage.act()
        if stage.optimizer is None:
            stage.construct()
        values, saved = stage.values(), copy.deepcopy(stage.optimizer.state_dict())
        stage.train(2, 10)
        ways.append(Way(values, stage.values(), saved))
        assert_torch_agrees(scene, done, ways[-1])
    return ways[0], ways[1]


def assert_torch_agrees(scene: Scene, done: bool, way: Way) -> None:
    """The same with torch's optimizer in the place of ours, where it has such an operation."""
    operation = "state_dict" if scene.operation in PLACED else scene.operation
    theirs = Stage(Scene(operation, scene.placement, scene.case, scene.device), theirs=True)
    if done:
        theirs.act()
    if theirs.optimizer is None:
        theirs.construct()
    theirs.train(2, 10)
    other = theirs.values()
    assert other.keys() == way.later.keys()
    for key, value in other.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(way.later[key], value, rtol=2e-5, atol=2e-6)
        else:
            assert way.later[key] == value


def is_same(now: Values, want: Values, has_step: bool) -> bool:
    """Bit for bit; new state of nothing but zeros is as good as none, where it holds its count."""
    if not want.keys() <= now.keys():
        return False
    more = [now[key] for key in now.keys() - want.keys()]
    if not all(isinstance(value, torch.Tensor) for value in more):  # a group more
        return False
    if any(value.count_nonzero() for value in more) or (more and not has_step):
        return False
    return all(_equal(now[key], value) for key, value in want.items())


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else bool(a == b)


def _assert_moves_lose_nothing(stage: Stage, way: Way) -> None:
    """A page that is counted where it is not shows when pages move again."""
    if stage.scene.operation not in (*PLACED, "construct", "first step") or stage.scene.placement == "resident":
        return
    for budget in (None, 0):
        stage.optimizer.set_device_budget(budget)
        assert is_same(stage.values(), way.later, True), f"the budget {budget} shows other values"


def _assert_refused_and_healed(stage: Stage, way: Way) -> None:
    opt = stage.optimizer
    give(stage.params, 10)
    for act in (opt.step, lambda: pickle.dumps(opt), lambda: copy.deepcopy(opt), opt.state_dict):
        assert "damaged" in refusal(act)
    with torch.no_grad():
        for i, p in enumerate(stage.params):
            p.copy_(way.values[i, "param"])
    opt.load_state_dict(copy.deepcopy(way.saved))
    if stage.scene.operation in OF_SGD:  # what is loaded now is stored as the cast parameter: the numbers are the same
        tensors = {key: value for key, value in way.values.items() if isinstance(value, torch.Tensor)}
        assert all(torch.equal(stage.values()[key].double(), value.double()) for key, value in tensors.items())
        stage.train(2, 10)
        return
    assert is_same(stage.values(), way.values, stage.case.has_step), "loading has not healed it"
    stage.train(2, 10)
    assert is_same(stage.values(), way.later, True), "the next steps are wrong"


def _differences(now: Values, before: Values, after: Values) -> str:
    names = [key for key, value in now.items() if key not in after or not _equal(value, after[key])]
    others = [key for key, value in now.items() if key not in before or not _equal(value, before[key])]
    return f"{others} are not what they were, {names} not what they should become"
