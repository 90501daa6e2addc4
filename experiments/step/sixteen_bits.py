"""What do parameters in bfloat16 lose in training, and what does it cost to lose nothing?

Answer (H200, 2026-11): rounded to nearest, 0.26 nats per byte at a learning rate of 1e-4 and 0.63 at 1e-5.  Rounded at
random, or with 8 or 16 more bits, less than 0.002; a step then takes 2 to 23 % longer.

A GPT of 25 M parameters is trained on bytes, from the same weights and on the same batches: in float32, and in bfloat16
rounded to nearest, rounded at random, with the next 8 bits that bfloat16 loses, and with all 16.  State is float32 in
all of them.  Shown are the loss at the end, the share of parameters that are not what they were, and how far all are
from those of float32, as a share of the way that these have gone.

A step of each over the same parameters is timed beside a copy of the bytes that it must move.  Then all that is paged
(state in 8 bits and the next 8 bits of parameters) is on the host, beside a copy over the link in both directions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from experiments.child import Child
from experiments.clock import Case
from experiments.columns import error, formatted, ms, percent, ratio
from experiments.comparing import on_own_clock, over
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, ORANGE, Bars, Lines
from experiments.works import builds
from experiments.works.link import BOTH, Link
from experiments.works.models import BITS_8, COPY, HYPER, OURS, Work
from experiments.works.paged import FULL, QUICK
from experiments.works.steps import checked, copy_of_bytes
from pagedopt import PagedAdamW
from pagedopt.commands.gpt import build_model, learning_rate, load_corpus, sample_batch, to_device
from pagedopt.planning.sizes import BYTES, Size

MEASURES = ("kernels", "launch", "tables", "optim", "paging")
GPT, TOY = Size(8, 8, 512, 256, BYTES, 16, 2000, 1e-4), Size(1, 2, 16, 32, BYTES, 2, 8, 1e-4)
#: Seeds by peak learning rate.
SEEDS = {1e-3: (0,), 1e-4: (0, 1, 2), 1e-5: (0,)}


@dataclass(frozen=True)
class Way:
    """How parameters are stored.

    Attributes:
        options: of PagedAdamW.
        moved: bytes that a step reads and writes for each parameter, with a gradient in bfloat16.
        needs: a package, whose optimizer takes the place of PagedAdamW.
        trains: whether it is trained, and not timed alone.
    """

    options: dict[str, Any]
    moved: float
    dtype: torch.dtype = torch.bfloat16
    color: str = BLUE
    needs: str = ""
    trains: bool = True

    def optimizer(self, params: list[torch.nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        """One over these parameters."""
        if not self.needs:
            return PagedAdamW(params, **{**HYPER, **self.options, **more})
        made: torch.optim.Optimizer = importlib.import_module("torchao.optim")._AdamW(
            params, bf16_stochastic_round=True, **{**HYPER, **more}
        )
        return made


WIDE, NEAREST, DRAWN, EIGHT, ALL = "float32", "to nearest", "at random", "+8", "+16"
EIGHT_INT8 = "+8, state in int8"
FLOAT32 = {"state_format": "float32"}
WAYS = {
    WIDE: Way({}, 26, torch.float32, GRAY),
    NEAREST: Way(FLOAT32, 22, color=GRAY),
    DRAWN: Way({**FLOAT32, "param_rounding": "stochastic"}, 22),
    EIGHT: Way({"param_format": "bfloat16+8"}, 24),
    ALL: Way({"param_format": "bfloat16+16"}, 26),
    "to nearest, state in int8": Way({"state_format": "int8"}, 6 + 2 * BITS_8, color=GRAY, trains=False),
    EIGHT_INT8: Way({"param_format": "bfloat16+8", "state_format": "int8"}, 8 + 2 * BITS_8),
    "torchao, at random": Way({}, 14, color=ORANGE, needs="torchao"),
}


#: ``--merge`` adds what is asked for to what this commit has measured.
GOES_ON = True
PARTS = ("training", "step", "away")


def options(parser: argparse.ArgumentParser) -> None:
    """Some of the parts."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")


def measure(run: Run) -> Iterator[Row]:
    """A row per way, learning rate and seed; then one per way that is timed, and per place of what is paged."""
    yield from (row for row in run.known if row["what"] not in run.options.parts)
    if "training" in run.options.parts:
        yield from trained(run)
    if run.device.type == "cpu" and not run.quick:
        run.leave_out("times of steps: need a GPU")
        return
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    work = replace(run.size(FULL, QUICK), name="bf16", dtype=torch.bfloat16, tolerance=0.3)
    if "step" in run.options.parts:
        yield from stepped(run, work)
    if "away" in run.options.parts and run.device.type == "cuda":
        yield from away(run, work)


# --- training


def trained(run: Run) -> Iterator[Row]:
    """What each way learns, and where its parameters end: one process per learning rate and seed, all at once."""
    ways = [case for case, way in WAYS.items() if way.trains]
    for case in [case for case in ways if WAYS[case].needs and (run.quick or not find_spec(WAYS[case].needs))]:
        run.leave_out(f"training {case}: {WAYS[case].needs} is not here, or only a toy is asked for")
        ways.remove(case)
    if run.quick:
        yield from one_seed(str(run.device), ways, 1e-3, 0, asdict(TOY))
        return
    pairs = [(lr, seed) for lr, seeds in SEEDS.items() for seed in seeds]
    children = [Child(one_seed, str(run.device), ways, *pair, asdict(GPT), limit=3600) for pair in pairs]
    with ThreadPoolExecutor(len(children)) as pool:
        for rows in pool.map(list[Row], children):
            yield from rows
    for child, (lr, seed) in zip(children, pairs, strict=True):
        if child.ended:
            run.leave_out(f"training at {lr:g}, seed {seed}: {child.ended.strip().splitlines()[-1]}")


def one_seed(device: str, ways: Sequence[str], lr: float, seed: int, size: dict[str, Any]) -> Iterator[Row]:
    """A row per way, all from the same weights and over the same batches; float32 is the first."""
    begin = goal = torch.empty(0)
    for case in ways:
        losses, first, last = one(torch.device(device), WAYS[case], lr, seed, Size(**size))
        if case == WIDE:
            begin, goal = first, last
        yield {
            "what": "training", "case": case, "lr": lr, "seed": seed,
            "loss": float(np.mean(losses[-max(1, len(losses) // 20) :])),
            "moved": 100 * float((last != first).double().mean()),
            "apart": 100 * float((last - goal).norm() / (goal - begin).norm()),
        }  # fmt: skip


def one(
    device: torch.device, way: Way, lr: float, seed: int, size: Size
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """The losses of a run, and what its parameters stand for before and behind it."""
    model = build_model(size, seed, device).bfloat16().to(way.dtype)
    params = list(model.parameters())
    optimizer, text, losses = way.optimizer(params), load_corpus(size.block), list[torch.Tensor]()
    exact: Callable[[torch.Tensor], torch.Tensor] = getattr(optimizer, "master", torch.Tensor.detach)

    def stand() -> torch.Tensor:
        return torch.cat([exact(p).flatten().cpu().double() for p in params])

    first = stand()
    for step in range(size.steps):
        for group in optimizer.param_groups:
            now = learning_rate(step, size.steps, lr)
            if isinstance(group["lr"], torch.Tensor):  # torchao's
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        narrow = device.type == "cuda" and way.dtype is torch.float32  # products are in bfloat16 for all
        with torch.autocast("cuda", torch.bfloat16) if narrow else contextlib.nullcontext():
            loss = model(*to_device(sample_batch(text, size.batch, size.block, seed, step), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), first, stand()


# --- times


def stepped(run: Run, work: Work) -> Iterator[Row]:
    """Steps with all state on the device, and a copy of the bytes of one."""
    ways = {f"{OURS}, {case}": way for case, way in WAYS.items() if case != WIDE and not way.needs}
    makes = {case: builds.ours(**way.options) for case, way in ways.items()}
    cases, errors = checked(run, work, makes, run.device)
    cases.append(copy_of_bytes(replace(work, bytes_each=WAYS[ALL].moved), run.device))
    for case, timing in run.measure(cases).items():
        moved = ways[case].moved if case in ways else WAYS[ALL].moved
        yield {
            "what": "step", "case": case, "device": run.device.type, "bytes": round(moved * work.numel),
            "error": errors.get(case), **timing,
        }  # fmt: skip


def away(run: Run, work: Work) -> Iterator[Row]:
    """A step with all that is paged on the host, and what the link does in both directions at once."""
    link = Link.of(run)
    plain = run.measure([Case(BOTH, link.both)])[BOTH]
    yield {"what": "away", "case": BOTH, "device": "cuda", "bytes": 2 * link.nbytes, "error": None, **plain}
    del link
    run.free()
    way = WAYS[EIGHT_INT8]
    step = way.optimizer(work.parameters(run.device), device_budget=0, host_access="staged").step
    nbytes = round(2 * (BITS_8 + 1) * work.numel)
    for case, timing in run.measure([Case(EIGHT_INT8, step)]).items():
        yield {"what": "away", "case": case, "device": "cuda", "bytes": nbytes, "error": None, **timing}


# --- what follows


def derive(rows: Rows) -> Rows:
    """A row per way and learning rate, over its seeds; the share of a copy of the same bytes; times over the link's."""
    found = Rows()
    for group in rows.where(what="training").groups("case", "lr"):
        losses = [row["loss"] for row in group]
        wide = [row["loss"] for row in rows.where(what="training", case=WIDE, lr=group[0]["lr"])]
        found.append({
            **group[0], "loss": float(np.mean(losses)), "spread": max(losses) - min(losses), "seeds": len(group),
            "behind": float(np.mean(losses) - np.mean(wide)),
            **{name: float(np.mean([row[name] for row in group])) for name in ("moved", "apart")},
        })  # fmt: skip
    for what, reference in (("step", COPY), ("away", BOTH)):
        timed = on_own_clock(rows.where(what=what))
        copy = timed.first(case=reference)
        for row in timed:
            times = over(row["time"], copy and copy["time"])
            as_copied = times and copy and times * copy["bytes"] / row["bytes"]
            shown = as_copied if row["device"] == "cuda" else None
            found.append({**row, "share": shown and 100 / shown, "of_link": shown if what == "away" else None})
    return found


def color(name: str) -> str:
    """Ours are blue."""
    return next((way.color for case, way in WAYS.items() if name.endswith(case)), BLUE)


def report(page: Page, rows: Rows) -> None:
    """Tables of training and of times, a picture of each, and what is held to a limit."""
    training, timed = rows.where(what="training"), Rows([*rows.where(what="step"), *rows.where(what="away")])
    page.table(title, training, {"parameters": "case", "loss": formatted("loss", "{:.4f}"), "seeds": "seeds",
        "from least to most": lambda row: f"{row['spread']:.4f}" if row["seeds"] > 1 else "",
        "more than float32": formatted("behind", "{:+.4f}"),
        "moved": percent("moved"), "from float32's": percent("apart")}, by=("lr",))  # fmt: skip
    page.table(title_of_times, timed, {
        "step": "case", "ms": ms("time"), "of a copy": percent("share"),
        "÷ the link's time": ratio("of_link"), "error": error()}, by=("what",))  # fmt: skip
    page.picture("sixteen-bits", training, LOSSES, "Only rounding to nearest loses what a low rate teaches")
    page.picture("sixteen-bits-steps", rows.where(what="step"), TIMES,
        "What lost bits add to a step; dashed: a copy of the bytes of +16")  # fmt: skip
    for case, least in ((ALL, 92), (DRAWN, 80), (EIGHT_INT8, 60)):
        page.bar(f"{case}, share of a copy of its bytes", rows.where(what="step", case=f"{OURS}, {case}"),
            "share", f"≥ {least} %")  # fmt: skip
    page.bar("+8 with int8, all away, staged, over the link", rows.where(what="away", case=EIGHT_INT8), "of_link",
        "≤ 1.12 x")  # fmt: skip


def title(rows: Rows) -> str:
    """The rate that all have."""
    return f"A GPT of 25 M parameters, trained on bytes at a peak learning rate of {rows[0]['lr']:g}"


def title_of_times(rows: Rows) -> str:
    """Where state is."""
    where = {"step": "all on the device", "away": "all that is paged on the host"}[rows[0]["what"]]
    return f"A step of 268 M parameters, {where}"


LOSSES = [Lines(title="loss beyond that of float32 parameters", unit="nats per byte", x="lr", y="behind", each="case",
                label="peak learning rate", log="x", colors=color)]  # fmt: skip
TIMES = [Bars(title="a step of 268 M parameters, {device}", name="case", length="time", unit="ms", scale=1e3,
              line=COPY, colors=color)]  # fmt: skip
