"""How fast does one card train all parameters of a model of seven billion, and in how much memory?

Every optimizer has a process of its own, the same bfloat16 model in Llama's shapes, the same batches of 2,048 tokens a
sequence, and the same hyperparameters.  Each iteration (forward, with activations computed twice, backward and step) is
waited for.  GiB are the most that the driver has given away, without what it gave to others: torch's caches, CUDA's own
memory and pages of managed memory are in it.

Nothing pushes out bitsandbytes' pages here.  Where memory is short the driver does; "pages pushed out" stands for that:
each optimizer's pages go to the host as soon as it has stepped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments.child import only
from experiments.columns import formatted, last_line, ms, ratio
from experiments.comparing import over
from experiments.lab import Column, Page, Row, Rows, Run, number
from experiments.pictures import BLUE, Lines
from experiments.works.finetunes import BACKWARD, PLUS_8, RESIDENT, WAYS, Finetune
from experiments.works.llama import SEVEN, TOY, Shape, batches, described, made
from pagedopt.common.units import parse_bytes, text_of_bytes
from pagedopt.system.look import compiled_look

GOES_ON = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
BATCHES = ("4", "1")
#: Iterations that warm up, and that are timed: no new one after so many seconds, but never fewer than the first number.
PACE, QUICK = (3, (3, 10), 5.0), (1, (3, 3), 0.0)
#: Seconds until a process is stopped.
LONGEST = 90
GIB = 1 << 30
#: GiB of a card that people have.
SMALL = 24


def options(parser: argparse.ArgumentParser) -> None:
    """Some of the cases, a smaller model, and a smaller card."""
    for name, known in (("cases", tuple(WAYS)), ("batches", BATCHES)):
        text = f"some of {','.join(known)}; --merge adds them to what is measured"
        parser.add_argument(f"--{name}", type=some_of(known), default=known, metavar="NAMES", help=text)
    parser.add_argument("--layers", type=int, default=SEVEN.layers, metavar="N", help="of the model (default: 32)")
    parser.add_argument("--card", type=parse_bytes, metavar="BYTES", help="as on a GPU with so much memory, as 24GiB")


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """What makes a list of names of a text, or says which there are."""

    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        return names

    return chosen


def measure(run: Run) -> Iterator[Row]:
    """A row per batch and case.  Those that ended badly are tried again if they are asked for."""
    if run.device.type == "cpu" and not run.quick:
        run.leave_out("all of it: seven billion parameters need a GPU; --quick has a toy")
        return
    asked, shape = run.options, run.size(replace(SEVEN, layers=run.options.layers), TOY)
    card = text_of_bytes(asked.card) if asked.card else ""
    numel = sum(p.numel() for p in described(shape).parameters())
    plan = [
        {"case": case, "batch": int(batch), "tokens": shape.tokens, "numel": numel, "card": card}
        for batch in asked.batches
        for case in asked.cases
    ]
    known = Rows(row for row in run.known if not row["ended"] or not any(of.items() <= row.items() for of in plan))
    yield from known
    for about in run.each([about for about in plan if not known.where(**about)]):
        row = {"ended": None, **about, **one(run, about["case"], about["batch"], shape, asked.card)}
        run.say(f"{WAYS[row['case']].name}, batch {row['batch']}: {row['ended'] or number(ms('time')(row)) + ' ms'}")
        yield row


def one(run: Run, case: str, batch: int, shape: Shape, card: int | None) -> Row:
    """What a case measures, or how it ended; toys stay in this process."""
    if (package := WAYS[case].needs) and importlib.util.find_spec(package) is None:
        return {"ended": f"{package} is not installed"}
    if run.quick:
        return next(trained(case, batch, str(run.device), asdict(shape), card, 0, QUICK))
    free, total = torch.cuda.mem_get_info(run.device)
    try:
        return only(trained, case, batch, str(run.device), asdict(shape), card, total - free, PACE, limit=LONGEST)
    except RuntimeError as error:
        return {"ended": str(error)}


# --- in a process of its own


def trained(
    case: str, batch: int, device: str, shape: dict[str, int], card: int | None, others: int, pace: Any
) -> Iterator[Row]:
    """Times of iterations (µs), bytes of the device beside those that others take, and losses; or how it ended."""
    try:
        yield _trained(case, batch, torch.device(device), Shape(**shape), card, others, pace)
    except torch.OutOfMemoryError as error:
        yield {"ended": f"does not fit: {error}"}
    except Exception as error:  # others' code may raise anything
        yield {"ended": f"{type(error).__name__}: {error}"}


def _trained(
    case: str, batch: int, device: torch.device, shape: Shape, card: int | None, others: int, pace: Any
) -> Row:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchao updates on the CPU
        compiled_look(wait=True)  # ours would look in Python until it has been compiled
        free, total = torch.cuda.mem_get_info()
        if card:  # what CUDA takes for itself is not torch's
            torch.cuda.set_per_process_memory_fraction(max(card - (total - free - others), 0) / total)
    finetune = Finetune(made(shape, device), WAYS[case], batches(shape, batch, device), device)
    row = {**finetune.times(*pace), **finetune.memory(), "losses": torch.stack(finetune.losses).tolist()}
    if row["taken"] is not None:
        row["taken"] -= others
        if card and row["taken"] > card:
            return {"ended": f"does not fit: takes {text_of_bytes(row['taken'])} by the driver's count"}
    return row


def derive(rows: Rows) -> Rows:
    """In the order of the cases: tokens a second, GiB, time over torch's fused, and the loss of an iteration that all
    of a batch have had."""
    found = Rows()
    for group in Rows(sorted(rows, key=order)).groups("numel", "card", "batch"):
        done = Rows(row for row in group if not row["ended"])
        resident, backward = ((done.first(case=case) or {}).get("time") for case in (RESIDENT, BACKWARD))
        last = min((len(row["losses"]) for row in done), default=0) - 1
        for row in group:
            found.append({**row, "name": WAYS[row["case"]].name, "clock": "wall", "drawn": False})
            if row in done:
                found[-1] |= {
                    "seconds": row["time"]["median"] / 1e6, "hooks_ms": row["hooks"]["median"] / 1e3,
                    "tokens_s": row["batch"] * row["tokens"] * 1e6 / row["time"]["median"],
                    "of_resident": over(row["time"], resident), "loss": row["losses"][last],
                    **{name: row[name] and row[name] / GIB for name in ("taken", "allocated")},
                    "drawn": row["taken"] is not None and not row["card"],
                }  # fmt: skip
                if row["case"] == PLUS_8:
                    found[-1]["of_backward"] = over(row["time"], backward)
    return found


def order(row: Row) -> tuple[Any, ...]:
    """The whole model first, then the larger batch, then as :data:`WAYS` has them."""
    return -row["numel"], row["card"], -row["batch"], list(WAYS).index(row["case"])


def title(rows: Rows) -> str:
    """What all rows of a table have in common."""
    row = rows[0]
    card = f", no more than {row['card']}" if row["card"] else ""
    return f"{row['numel']:,} parameters, batch {row['batch']} ({row['batch'] * row['tokens']:,} tokens){card}"


def answers(rows: Rows) -> str:
    """A line per batch: ours within the backward beside torch's fused, and the fastest of the others in 24 GiB."""
    lines = []
    for group in rows.where(ended=None, card="").groups("numel", "batch"):
        ours, resident = group.first(case=BACKWARD), group.first(case=RESIDENT)
        if not ours or not resident or not ours["taken"]:
            continue
        shown = [f"{row['taken']:.1f} GiB and {row['tokens_s']:,.0f} tokens/s" for row in (ours, resident)]
        lines.append(
            f"- {ours['numel'] / 1e9:.2f} billion parameters, batch {ours['batch']}: {shown[0]} within the "
            f"backward; {shown[1]} with torch's fused AdamW, whose state is on the GPU. That is "
            f"{ours['tokens_s'] / resident['tokens_s']:.0%} of the speed in {ours['taken'] / resident['taken']:.0%} of "
            "the memory."
        )
        others = [row for row in group if WAYS[row["case"]].color != BLUE and row["taken"] <= SMALL]
        if others:
            best = max(others, key=lambda row: float(row["tokens_s"]))
            lines[-1] += (
                f" The fastest of the others in {SMALL} GiB is {best['name']}: {best['taken']:.1f} GiB and "
                f"{best['tokens_s']:,.0f} tokens/s."
            )
    return "\n".join(lines)


COLUMNS: dict[str, Column] = {
    "optimizer": "name", "tokens/s": formatted("tokens_s", "{:,.0f}"), "GiB on the card": formatted("taken", "{:.1f}"),
    "of it torch's": formatted("allocated", "{:.1f}"), "ms an iteration": ms("time"),
    "÷ torch fused": ratio("of_resident"), "host: hooks, ms": ms("hooks"),
    "host: step(), ms": ms("step"), "loss": formatted("loss", "{:.3f}"), "why not": last_line(),
}  # fmt: skip
WITHIN: dict[str, Any] = {"case": BACKWARD, "card": "", "numel": 6_738_415_616}


def color(name: str) -> str:
    """Of the package."""
    return next(way.color for way in WAYS.values() if way.name == name)


def finding(rows: Rows) -> str:
    """What ours within the backward takes of the speed and the memory of torch's fused; best is up and to the left."""
    ours, resident = rows.first(case=BACKWARD), rows.first(case=RESIDENT)
    if not ours or not resident:
        return ""
    speed, memory = (f"{100 * ours[name] / resident[name]:.0f} %" for name in ("tokens_s", "taken"))
    return f"State in 8 bits on the host: {speed} of the speed of torch's fused AdamW in {memory} of its memory"


PANEL = Lines(title="{numel:,} bfloat16 parameters, batches of {batch} x {tokens:,} tokens", unit="tokens/s",
              x="taken", y="tokens_s", each="name", label="GiB on the card, by the driver's count", log="", zero="xy",
              colors=color, inches=3.6)  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, pictures, and what is held to a limit."""
    page.table(title, rows, COLUMNS, by=("numel", "card", "batch"))
    page.say(answers(rows), "answers")
    for name, batch in (("speed-and-memory", 4), ("batch-1", 1)):
        drawn = rows.where(drawn=True, batch=batch)
        page.picture(name, drawn, [PANEL], finding(drawn), by=("numel",))
    for batch, what, column, most, unit in (
        (4, "an iteration over torch's fused", "of_resident", 1.06, "x"),
        (4, "memory of the card", "taken", 18.8, "GiB"),
        (4, "host in hooks", "hooks_ms", 60.0, "ms"),
        (1, "an iteration", "seconds", 0.42, "s"),
        (1, "memory of the card", "taken", 16.0, "GiB"),
        (1, "host in hooks", "hooks_ms", 60.0, "ms"),
    ):
        page.bar(f"batch {batch}, within the backward: {what}", rows.where(batch=batch, **WITHIN), column,
            f"≤ {most} {unit}")  # fmt: skip
    if eight := rows.where(**{**WITHIN, "case": PLUS_8, "batch": 4}):
        page.bar("batch 4, bfloat16+8: over the same without", eight, "of_backward", "≤ 1.12 x")
        page.bar("batch 4, bfloat16+8: memory of the card", eight, "taken", "≤ 19.0 GiB")
