"""How large is the update error with 8-bit moments, and what becomes of elements whose gradient stops, or comes rarely?

Answer (CPU, 2026-11): AdamW's update is off by 5 % at β2 0.999, where bitsandbytes' code has 14 %; first moments do up
to 0.99.  Without a gradient elements go as far as in float32, to 4 %; at β1 0.9 the furthest twice as far, at 0.99 five
times.  Small ones take updates up to 14 times as large as float32's.

A small GPT trains in float32.  Beside it, for each code, an optimizer stores state in that code and gets the same
gradients.  Its parameters are zero before each step, so after it they are the update.

``rare_rows`` has blocks of 256 elements with a gradient of normal numbers in each step, of which three kinds of
elements differ, eight of each kind:

* their gradient is zero after the first step;
* their gradient is small: down to a millionth of the others' size;
* their gradient has the others' size in every hundredth step, and a thousandth of it in between, as in rows of a tied
  embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch

from experiments.columns import percent, ratio
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Lines
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD
from pagedopt.commands.gpt import build_model, learning_rate, load_corpus, sample_batch, to_device
from pagedopt.formats import int8
from pagedopt.formats.int8 import BLOCK, FEWEST, MAX_DECAY
from pagedopt.planning.sizes import BYTES, Size

ANSWERS = {"codes": "codes", "rare_rows": "rare_rows"}
#: The name of the experiments' note.
NOTE = "int8"
MEASURES = ("kernels", "formats")


def measure(run: Run) -> Iterator[Row]:
    """A row per optimizer, decay and code; or per pair of decays and code."""
    if run.part == "rare_rows":
        for pair in run.each(((0.9, 0.95), (0.9, 0.999), (0.99, 0.999))):
            yield from played(run, pair)
    else:
        for family in run.each(RATES):
            yield from trained(run, family)


# --- other codes of 8 bits than the package's: float32 state is replaced by what such a code leaves of it

#: Replaces the numbers of a tensor.
Code = Callable[[torch.Tensor], None]
#: Options of an optimizer, and the codes of its float32 state that is rounded after each step, by its name.
Contender = tuple[dict[str, Any], dict[str, Code]]


def in_blocks(flat: torch.Tensor, block: int) -> torch.Tensor:
    """Numbers in lines of a block each, the last one with zeros behind them."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


@cache
def table(signed: bool) -> torch.Tensor:
    """The numbers of bitsandbytes' dynamic code that are not negative, in order."""
    counts = [2 ** (i if signed else i + 1) for i in range(7)]
    inner = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / n) for i, n in enumerate(counts) for j in range(n)]
    return torch.tensor([0.0, *inner, 1.0])


def published(values: torch.Tensor, signed: bool) -> None:
    """Replace numbers by the nearest of bitsandbytes' code, which has no -1; what is negative stays so."""
    flat, known = values.view(-1), table(signed).to(values.device)
    numbers = in_blocks(flat, BLOCK)
    absmax = numbers.abs().amax(1, keepdim=True)
    near = torch.bucketize(torch.where(absmax > 0, numbers.abs() / absmax, 0), (known[1:] + known[:-1]) / 2)
    near = torch.where(numbers < 0, near.clamp(1, len(known) - 2), near)
    flat.copy_((known[near].copysign(numbers) * absmax).view(-1)[: len(flat)])


def flash(values: torch.Tensor, signed: bool, block: int = 32) -> None:
    """Replace numbers by those of FlashOptim's code: 127 * 2n / (1 + |n|), or 255 times a root of a second moment,
    rounded half up, in blocks with a scale in float16."""
    flat = values.view(-1)
    numbers = in_blocks(flat, block) if signed else in_blocks(flat, block).sqrt()
    scale = numbers.abs().amax(1, keepdim=True)
    share = torch.where(scale > 0, numbers / scale, 0)
    if signed:
        level = (2 * share / (1 + share.abs()) * 127 + 0.5).floor() / 127
        level = level / (2 - level.abs())
    else:
        level = (share * 255 + 0.5).floor() / 255
    made = level * scale.half().float()
    flat.copy_((made if signed else made.square()).view(-1)[: len(flat)])


def of_states(code: Callable[..., None], *names: str) -> dict[str, Code]:
    """A code for each state; second moments are not negative."""
    return {name: partial(code, signed=name != "exp_avg_sq") for name in names}


# --- an optimizer with a code, and its update

BOTH, FIRST = "both moments", "the first moment alone"
FLOAT32, BFLOAT16, RIVAL, SMALL_BLOCKS = "float32", "bfloat16", "bitsandbytes' code", "FlashOptim's code, blocks of 32"
OURS, NEAREST = "int8", "int8, all to the nearest"
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
SEED = 0
#: Steps between those that are compared, which takes as long as a step.
LOOK = 10


def codes(family: str, which: str) -> dict[str, Contender]:
    """The contenders."""
    exact, both = {"state_format": "float32"}, ("exp_avg", "exp_avg_sq")
    if which == FIRST:  # not "int8", which refuses long decays
        moment: Any = "momentum_buffer" if family == "SGD" else "exp_avg"
        first = int8.FIRST["by step" if family == "AdamW" else "by data"]
        return {
            FLOAT32: (exact, {}), RIVAL: (exact, of_states(published, moment)),
            BFLOAT16: ({"state_format": {moment: "bfloat16"}}, {}), OURS: ({"state_format": {moment: first}}, {}),
        }  # fmt: skip
    return {
        FLOAT32: (exact, {}), RIVAL: (exact, of_states(published, *both)),
        SMALL_BLOCKS: (exact, of_states(flash, *both)), BFLOAT16: ({"state_format": "bfloat16"}, {}),
        OURS: ({"state_format": "int8"}, {}),
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


def trained(run: Run, family: str) -> Iterator[Row]:
    """A row per decay and code, of one training: the means over steps of its second half, and the largest update."""
    text, steps, (rate, usual) = load_corpus(SIZE.block), run.size(SIZE.steps, 4), RATES[family]
    model = build_model(run.size(SIZE, replace(SIZE, width=64)), SEED, run.device)
    params = list(model.parameters())
    stored = [p for p in params if p.numel() >= FEWEST]
    leader = optimizer(family, (0.9, usual) if family == "AdamW" else usual, params, rate)
    twins = {
        (which, decay): {name: Twin(stored, of, decay, code) for name, code in codes(of, which).items()}
        for (of, which), decays in DECAYS.items() if of == family for decay in decays
    }  # fmt: skip
    found: dict[Any, list[Row]] = {(*key, name): [] for key, group in twins.items() for name in group}
    for step in range(steps):
        loss = model(*to_device(sample_batch(text, SIZE.batch, SIZE.block, SEED, step), run.device))
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


# --- elements that differ

BLOCKS, MARKS = 64, (100, 1000, 5000)
#: Of a block's elements every so many; sizes beside the block's; and steps between two hits, with the size in between.
EVERY, SIZES, HIT, BETWEEN = 32, (1e-4, 1e-5, 1e-6), 100, 1e-3
LR = 1e-3


def played(run: Run, pair: tuple[float, float]) -> Iterator[Row]:
    """How far elements without a gradient went, what is left of their momentum, and the largest updates."""
    steps, marks = run.size((5000, MARKS), (8, (2, 4, 8)))
    param = torch.nn.Parameter(torch.zeros(BLOCKS, BLOCK))
    twins = {name: Twin([param], "AdamW", pair, code) for name, code in codes("AdamW", BOTH).items()}
    ended, small, tied = (torch.arange(BLOCKS * BLOCK).view(BLOCKS, BLOCK)[:, i::EVERY] for i in (0, 8, 16))
    sizes = torch.tensor(SIZES).repeat(BLOCKS)[:BLOCKS].view(-1, 1)
    draw = torch.Generator().manual_seed(0)
    far = {name: torch.zeros(BLOCKS * BLOCK) for name in twins}
    found: dict[str, dict[str, float]] = {name: {} for name in twins}
    first: dict[str, float] = {}
    for step in range(1, steps + 1):
        grad = torch.randn(BLOCKS, BLOCK, generator=draw)
        flat = grad.view(-1)
        flat[small] *= sizes
        if step > 1:
            flat[ended] = 0
        if step % HIT:
            flat[tied] *= BETWEEN
        for name, twin in twins.items():
            twin.step([grad])
            update, row = twin.update, found[name]
            far[name] += LR * update
            kinds = {f"small {size:g}": small[i :: len(SIZES)] for i, size in enumerate(SIZES)} | {"tied": tied}
            for key, which in kinds.items() if step == 1 else (kinds | {"ended": ended}).items():
                row[key] = max(row.get(key, 0.0), float(update[which].abs().max()))
            if step == 1 or step in marks:
                left = float(twin.moment("exp_avg")[ended].abs().mean())
                first.setdefault(name, left)
                if step > 1:
                    row[f"left after {marks.index(step)}"] = left / first[name]
    for name, row in found.items():
        gone = far[name][ended].abs()
        yield {"case": "play", "beta1": pair[0], "beta2": pair[1], "steps": steps, "code": name, **row,
               "mean": float(gone.mean()), "most": float(gone.max())}  # fmt: skip


# --- what follows

#: What a picture shows.
DRAWN = {BOTH: (RIVAL, SMALL_BLOCKS, OURS, NEAREST), FIRST: (RIVAL, OURS)}


def derive(rows: Rows) -> Rows:
    """Errors beside those of bitsandbytes' code, and of the same code at a decay of 0.9; distances beside float32's."""
    found = Rows()
    for row in rows.where(case="play"):
        exact = rows.where(case="play", beta1=row["beta1"], beta2=row["beta2"], code=FLOAT32)[0]
        ratios = {f"of_{name}": row[name] / exact[name] for name in ("mean", "most", "tied")}
        found.append({**row, **ratios, "off": 100 * abs(ratios["of_mean"] - 1)})
    for row in (row for row in rows if "which" in row):
        alike = rows.where(family=row["family"], which=row["which"], beta1=row["beta1"])
        here, code = alike.where(decay=row["decay"]), row["code"]
        rival, nine = here.number("error", code=RIVAL), alike.number("error", decay=0.9, code=code)
        found.append({
            **row,
            "half": here.number("error", code=BFLOAT16),
            "of_rival": row["error"] / rival if rival else None,
            "of_nine": row["error"] / nine if nine else None,
            "off": None if row.get("bias") is None else abs(row["bias"]),
            "allowed": "yes" if row["decay"] <= MAX_DECAY else "no",
            "line": code if row["which"] == BOTH else f"{row['family']}, {code}",
            "drawn": row["which"] if code in DRAWN[row["which"]] else "",
            "remembers": 1 / (1 - row["decay"]),
        })  # fmt: skip
    return found


PANELS = [
    Lines(title="The first moment alone: error of the update, of Lion that of the momentum", where={"drawn": FIRST},
          x="remembers", y="error", each="line", unit="error, %",
          label="steps that the moment remembers, 1 / (1 - decay)")
]  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    if page.section == "rare_rows":
        shown, mine = (FLOAT32, RIVAL, OURS), rows.where(code=OURS)
        page.table("No gradient any more: {steps:,} steps", Rows(row for row in rows if row["code"] in shown),
            {"state": "code", "β1": "beta1", "β2": "beta2",
            "mean distance ÷ float32's": ratio("of_mean"), "largest distance ÷ float32's": ratio("of_most"),
            "largest update": "ended"})  # fmt: skip
        page.bar("no gradient any more: mean distance, off float32's", mine, "off", "≤ 5 %")
        page.bar("no gradient any more: largest distance ÷ float32's", mine, "of_most", "≤ 2 x")
        page.bar("tied rows: largest update ÷ float32's", mine, "of_tied", "≤ 3.5 x")
        return
    both = rows.where(which=BOTH)
    page.table("AdamW, both moments: {numel:,} parameters, {steps} steps",
        Rows(row for row in both if row["code"] in DRAWN[BOTH]), {"state": "code", "β1": "beta1", "β2": "decay",
        "error of the update": percent("error", "{:.2f} %"), "÷ bitsandbytes'": ratio("of_rival"),
        "bias of v": percent("bias", "{:+.1f} %"), "largest update": "worst"})  # fmt: skip
    page.picture("errors", rows, PANELS, "The longer a moment remembers, the further 8 bits take its update off")
    mine, usual = both.where(code=OURS), both.where(code=OURS, beta1=0.9, decay=0.999)
    first = rows.where(which=FIRST, code=OURS, allowed="yes")
    page.bar("AdamW, β2 0.999: error ÷ bitsandbytes'", usual, "of_rival", "≤ 0.5 x")
    page.bar("AdamW: bias of v", mine, "off", "≤ 1.0 %")
    page.bar(f"first moments up to {MAX_DECAY}: error ÷ bitsandbytes'", first, "of_rival", "≤ 1.0 x")
