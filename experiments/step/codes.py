"""How large is the update error with 8-bit moments, by decay rate?

Answer (CPU, 2026-11): AdamW's by 5 % at β2 0.999, where bitsandbytes' code has 14 %; first moments do up to 0.99.

A small GPT trains in float32.  Beside it, for each code, an optimizer stores state in that code and gets the same
gradients.  Its parameters are zero before each step, so after it they are the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import fmean
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from experiments.lab import Column, Page, Row, Rows, Run, percent, ratio
from experiments.pictures import Lines
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD
from pagedopt.commands.gpt import Bytes, build_model, learning_rate, load_corpus, sample_batch, to_device
from pagedopt.formats import int8
from pagedopt.formats.int8 import BLOCK, FEWEST, MAX_DECAY
from pagedopt.planning.sizes import BYTES, Size

# --- other codes of 8 bits than the package's: float32 state is replaced by what such a code leaves of it

Array = npt.NDArray[Any]
#: Replaces the numbers of a tensor.
Code = Callable[[torch.Tensor], None]
#: Elements of a block of FlashOptim's.
SMALL = 32


@cache
def table(signed: bool) -> tuple[Array, Array, Array]:
    """The numbers of bitsandbytes' dynamic code that are not negative, in order; the middles between them; and for the
    upper 16 bits of a float32 up to 1 how many middles are below: a search among 256 takes ten times as long."""
    counts = [2 ** (i if signed else i + 1) for i in range(7)]
    inner = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / n) for i, n in enumerate(counts) for j in range(n)]
    known = np.array([0.0, *inner, 1.0], np.float32)
    middles = (known[1:] + known[:-1]) / 2
    starts = (np.arange(0x3F81, dtype=np.uint32) << 16).view(np.float32)
    return known, np.append(middles, np.float32(np.inf)), np.searchsorted(middles, starts).astype(np.uint8)


@numba.njit
def _put_published(values: Array, known: Array, middles: Array, below: Array, lowest: int, highest: int) -> None:
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        absmax = np.abs(block).max()
        if absmax > 0:
            shares = np.abs(block) / absmax
            upper = shares.view(np.uint32) >> 16
            for i in range(len(block)):
                near = below[upper[i]] + (shares[i] > middles[below[upper[i]]])
                if block[i] < 0:
                    near = min(max(near, lowest), highest)
                block[i] = np.copysign(known[near], block[i]) * absmax


@numba.njit
def _put_rooted(values: Array, root: int, top: int, least: int, random: bool) -> None:
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        absmax = np.abs(block).max()
        if absmax > 0:
            for i in range(len(block)):
                share = abs(block[i]) / absmax * np.float64(top) ** root
                code = np.floor(share ** (1.0 / root) + (0.0 if random else 0.5))
                if random:
                    low, high = code**root, (code + 1) ** root
                    code += np.random.random() * (high - low) < share - low
                code = min(max(code, least), top)
                block[i] = np.copysign((code / top) ** root * absmax, block[i])


def _on_host(values: torch.Tensor, put: Callable[[Array], None]) -> None:
    on_host = values.cpu()
    put(on_host.view(-1).numpy())
    values.copy_(on_host)


def published(values: torch.Tensor, signed: bool) -> None:
    """Replace numbers by the nearest of bitsandbytes' code, which has no -1; what is negative stays so."""
    known, middles, below = table(signed)
    _on_host(values, lambda numbers: _put_published(numbers, known, middles, below, 1, len(known) - 2))


def rooted(values: torch.Tensor, root: int, random: bool, signed: bool = True) -> None:
    """Replace numbers by those of a code that stores a root of their share of the block's largest magnitude: the
    nearest root, or at random so that the mean is the number."""
    top, least = (127, 0) if signed else (255, 1)
    _on_host(values, lambda numbers: _put_rooted(numbers, root, top, least, random))


def flash(values: torch.Tensor, signed: bool, block: int = SMALL) -> None:
    """Replace numbers by those of FlashOptim's code: 127 * 2n / (1 + |n|), or 255 times a root of a second moment,
    rounded half up, in blocks with a scale in float16."""
    flat = values.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    numbers = padded if signed else padded.sqrt()
    scale = numbers.abs().amax(1, keepdim=True)
    share = torch.where(scale > 0, numbers / scale, 0)
    if signed:
        level = (2 * share / (1 + share.abs()) * 127 + 0.5).floor() / 127
        level = level / (2 - level.abs())
    else:
        level = (share * 255 + 0.5).floor() / 255
    made = level * scale.half().float()
    flat.copy_((made if signed else made.square()).view(-1)[: len(flat)])


#: By name of the state: bitsandbytes' code, and FlashOptim's.
PUBLISHED: dict[str, Code] = {
    name: partial(published, signed=name != "exp_avg_sq") for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
}
FLASH: dict[str, Code] = {name: partial(flash, signed=name != "exp_avg_sq") for name in ("exp_avg", "exp_avg_sq")}


# --- the question

MEASURES = ("kernels", "formats")
#: Options of an optimizer, and the codes of its float32 state that is rounded after each step, by its name.
Contender = tuple[dict[str, Any], dict[str, Code]]
#: The name of the experiment's note.
NOTE = "int8"

BOTH, FIRST = "both moments", "the first moment alone"
FLOAT32, BFLOAT16, RIVAL, SMALL_BLOCKS = "float32", "bfloat16", "bitsandbytes' code", "FlashOptim's code, blocks of 32"
OURS, NEAREST = "int8", "int8, all to the nearest"
#: The first moment otherwise, beside a second one as in int8: root, and whether it is rounded at random.
OTHERS = {
    "m root 2, to the nearest (before)": (2, False), "m root 2, stochastic": (2, True),
    "m root 4, stochastic": (4, True),
}  # fmt: skip
#: By family: the rate at which the float32 model learns, and the decay that it has (of AdamW, of its second moment).
RATES = {"AdamW": (1e-3, 0.999), "SGD": (0.03, 0.9), "Lion": (2e-4, 0.99)}
#: Of AdamW with both moments in a code: pairs.
DECAYS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("AdamW", BOTH): ((0.9, 0.95), (0.9, 0.999), (0.99, 0.999)),
    ("AdamW", FIRST): (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
    ("SGD", FIRST): (0.9, 0.95, 0.98, 0.99, 0.999),
    ("Lion", FIRST): (0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
}
#: Of 870 thousand parameters: as in larger models, a row of the embedding is at least a block long.
SIZE = Size(layers=1, heads=4, width=256, block=64, vocabulary=BYTES, batch=8, steps=400, lr=0.0)
#: Steps of toys; steps between those that are compared, which takes as long as a step.
TOY_STEPS, LOOK = 4, 10


def first_moment(family: str) -> str:
    """The name of the first moment."""
    return "momentum_buffer" if family == "SGD" else "exp_avg"


def codes(family: str, which: str) -> dict[str, Contender]:
    """The contenders."""
    exact, moment = {"state_format": "float32"}, first_moment(family)
    if which == FIRST:  # not "int8", which refuses long decays
        how: int8.How = "by step" if family == "AdamW" else "by data"
        return {
            FLOAT32: (exact, {}), RIVAL: (exact, {moment: PUBLISHED[moment]}),
            BFLOAT16: ({"state_format": {moment: "bfloat16"}}, {}),
            OURS: ({"state_format": {moment: int8.FIRST[how]}}, {}),
        }  # fmt: skip
    both = ("exp_avg", "exp_avg_sq")
    beside = {"state_format": {"exp_avg": "float32", "exp_avg_sq": "int8"}}
    others: dict[str, Contender] = {name: (beside, {"exp_avg": partial(rooted, root=root, random=random)})
              for name, (root, random) in OTHERS.items()}  # fmt: skip
    return {
        FLOAT32: (exact, {}), RIVAL: (exact, {name: PUBLISHED[name] for name in both}), SMALL_BLOCKS: (exact, FLASH),
        BFLOAT16: ({"state_format": "bfloat16"}, {}), **others, OURS: ({"state_format": "int8"}, {}),
        NEAREST: ({"state_format": "int8", "rounding": "nearest"}, {}),
    }  # fmt: skip


def optimizer(family: str, decay: Any, params: list[torch.nn.Parameter], lr: float, **chosen: Any) -> Any:
    """An optimizer without weight decay, with these decays of both moments, or with this one of the first."""
    if family == "SGD":
        return PagedSGD(params, lr, momentum=decay, **chosen)
    if family == "Lion":
        return PagedLion(params, lr, (0.9, decay), **chosen)
    betas = decay if isinstance(decay, tuple) else (decay, 0.999)
    return PagedAdamW(params, lr, betas, weight_decay=0.0, **chosen)


class Twin:
    """An optimizer with a code, over parameters that are zero before each step: they become the update, negated."""

    def __init__(self, stored: list[torch.nn.Parameter], family: str, decay: Any, contender: Contender) -> None:
        self.params = [torch.nn.Parameter(torch.zeros_like(p)) for p in stored]
        chosen, self.rounded = contender
        self.optimizer: PagedOptimizer = optimizer(family, decay, self.params, 1.0, **chosen)

    def step(self, grads: list[torch.Tensor | None]) -> None:
        """Update parameters and state."""
        for p, grad in zip(self.params, grads, strict=True):
            p.detach().zero_()
            p.grad = grad
        self.optimizer.step()
        for p in self.params:
            for name, code in self.rounded.items():
                code(self.optimizer.state[p][name])

    @property
    def update(self) -> torch.Tensor:
        """That of the last step, of all parameters, for a learning rate of 1."""
        return torch.cat([p.detach().flatten() for p in self.params])

    def moment(self, name: str) -> torch.Tensor:
        """A state of all parameters in float32."""
        found = []
        for p in self.params:
            form = self.optimizer.format_of(name, p, self.optimizer.param_groups[0])
            columns = [self.optimizer.state[p][column.key(name)].flatten() for column in form.columns]
            found.append(form.decode(*columns, numel=p.numel()))
        return torch.cat(found)


def compared(twin: Twin, exact: Twin, lion: bool, v: bool) -> Row:
    """In percent: the error of an update (of Lion, of its momentum), how much of it goes the other way, and the bias of
    v; and the largest element of an update."""
    update, right = twin.update, exact.update
    found, wanted = (each.moment("exp_avg") for each in (twin, exact)) if lion else (update, right)
    turned = (update * right < 0).sum() / (right != 0).sum()
    row = {"error": float(100 * (found - wanted).norm() / wanted.norm()), "turned": 100 * float(turned)}
    if v:
        some = (squares := exact.moment("exp_avg_sq")) > 0
        bias = (twin.moment("exp_avg_sq")[some] / squares[some]).log().median()
        row |= {"bias": 100 * float(bias), "worst": float(update.abs().max())}
    return row


def trained(run: Run, text: Bytes, family: str) -> Iterator[Row]:
    """A row per decay and code, of one training: the means over steps of its second half, and the largest update."""
    steps, rate, usual = run.size(run.options.steps, TOY_STEPS), *RATES[family]
    model = build_model(SIZE, SIZE.block, run.options.seed, run.device)
    params = list(model.parameters())
    stored = [p for p in params if p.numel() >= FEWEST]
    leader = optimizer(family, (0.9, usual) if family == "AdamW" else usual, params, rate)
    twins = {
        (which, decay): {name: Twin(stored, of, decay, code) for name, code in codes(of, which).items()}
        for (of, which), decays in DECAYS.items() if of == family for decay in decays
    }  # fmt: skip
    found: dict[Any, list[Row]] = {(*key, name): [] for key, group in twins.items() for name in group}
    for step in range(steps):
        loss = model(*to_device(sample_batch(text, SIZE.batch, SIZE.block, run.options.seed, step), run.device))
        leader.zero_grad()
        loss.backward()
        leader.param_groups[0]["lr"] = learning_rate(step, steps, rate)
        leader.step()
        for key, group in twins.items():
            for name, twin in group.items():
                twin.step([p.grad for p in stored])
                if step >= steps // 2 and (steps - 1 - step) % LOOK == 0:
                    found[*key, name].append(compared(twin, group[FLOAT32], family == "Lion", key[0] == BOTH))
    about = {"family": family, "numel": sum(p.numel() for p in stored), "steps": steps, "loss": loss.item()}
    for (which, decay, name), rows in found.items():
        joined = {key: (max if key == "worst" else fmean)(row[key] for row in rows) for key in rows[0]}
        beta1, beta2 = decay if which == BOTH else (None, decay)
        yield {**about, "which": which, "beta1": beta1, "decay": beta2, "code": name, **joined}


def options(parser: Any) -> None:
    """Which run."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches; default: %(default)s")
    parser.add_argument("--steps", type=int, default=SIZE.steps, metavar="N", help="of training; default: %(default)s")


def measure(run: Run) -> Iterator[Row]:
    """A row per optimizer, decay and code."""
    text = load_corpus(SIZE.block)
    for family in run.each(RATES):
        yield from trained(run, text, family)


#: What a picture shows.
DRAWN = {BOTH: (RIVAL, SMALL_BLOCKS, OURS, NEAREST), FIRST: (RIVAL, OURS)}


def derive(rows: Rows) -> Rows:
    """Errors beside those of bitsandbytes' code, of bfloat16, and of the same code at a decay of 0.9."""
    found = Rows()
    for row in rows:
        alike = rows.where(family=row["family"], which=row["which"], beta1=row["beta1"])
        here, code = alike.where(decay=row["decay"]), row["code"]
        rival, nine = here.number("error", code=RIVAL), alike.number("error", decay=0.9, code=code)
        more = {
            "half": here.number("error", code=BFLOAT16),
            "rival": rival,
            "of_rival": row["error"] / rival if rival else None,
            "of_nine": row["error"] / nine if nine else None,
            "rival_turned": here.number("turned", code=RIVAL),
            "off": None if row.get("bias") is None else abs(row["bias"]),
            "allowed": "yes" if row["decay"] <= MAX_DECAY else "no",
            "line": row["code"] if row["which"] == BOTH else f"{row['family']}, {row['code']}",
            "drawn": row["which"] if row["code"] in DRAWN[row["which"]] else "",
            "remembers": 1 / (1 - row["decay"]),
        }
        found.append({**row, **more})
    return found


REMEMBERS = "steps that the moment remembers, 1 / (1 - decay)"
ABOUT: dict[str, Any] = {"x": "remembers", "y": "error", "each": "line", "unit": "error, %", "label": REMEMBERS}
TITLES = {BOTH: "AdamW, both moments in a code, by the decay of v: error of the update",
          FIRST: "The first moment alone: error of the update, of Lion that of the momentum"}  # fmt: skip
PANELS = [Lines(title=title, where={"drawn": which}, **ABOUT) for which, title in TITLES.items()]


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"state": "code", "β1": "beta1", "β2": "decay",
        "error of the update": percent("error", "{:.2f} %"), "÷ bitsandbytes'": ratio("of_rival"),
        "bias of v": percent("bias", "{:+.1f} %"), "largest update": "worst",
        "turned": percent("turned", "{:.2f} %")}  # fmt: skip
    both, title = rows.where(which=BOTH), "AdamW, both moments: {numel:,} parameters, {steps} steps"
    page.table(title, Rows(row for row in both if row["code"] in DRAWN[BOTH]), columns)
    page.detail.table(title, both, columns)
    page.detail.table("First moments alone, int8: {numel:,} parameters, {steps} steps",
        rows.where(which=FIRST, code=OURS), {"optimizer": "family", "decay": "decay",
        "error": percent("error"), "÷ at 0.9": ratio("of_nine"), "bitsandbytes'": percent("rival"),
        "bfloat16": percent("half", "{:.2f} %"), "turned": percent("turned", "{:.2f} %"),
        "turned, bitsandbytes'": percent("rival_turned", "{:.2f} %"), "allowed": "allowed"})  # fmt: skip
    page.picture("errors", rows, PANELS, "The longer a moment remembers, the further 8 bits take its update off")
    page.bar("AdamW, β2 0.999: error ÷ bitsandbytes'",
        rows.where(which=BOTH, code=OURS, beta1=0.9, decay=0.999), "of_rival", at_most=0.5, unit="x")  # fmt: skip
    page.bar("AdamW: bias of v", rows.where(which=BOTH, code=OURS), "off", at_most=1.0, unit="%")
    page.bar(f"first moments up to {MAX_DECAY}: error ÷ bitsandbytes'",
        rows.where(which=FIRST, code=OURS, allowed="yes"), "of_rival", at_most=1.0, unit="x")  # fmt: skip
