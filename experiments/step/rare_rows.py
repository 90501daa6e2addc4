"""What becomes of elements in 8 bits whose gradient stops, is small beside its block's, or comes rarely?

Answer (CPU, 2026-11): without a gradient they go as far as in float32, to 4 %; at β1 0.9 the furthest twice as far, at
0.99 five times.  Small ones take updates up to 14 times as large as float32's.

In a play, blocks of 256 elements have a gradient of normal numbers in each step.  In each block,
three kinds of elements differ, eight of each kind:

* their gradient is zero after the first step;
* their gradient is small: down to a millionth of the others' size;
* their gradient has the others' size in every hundredth step, and a thousandth of it in between, as in rows of a tied
  embedding.

In a real training, an embedding of 50,000 rows learns words, of which most are rare.  All formats get the same
gradients, as in ``codes``.
"""

from __future__ import annotations

import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.lab import Column, Page, Row, Rows, Run, percent, ratio
from experiments.step.codes import BOTH, FLOAT32, OURS, RIVAL, Twin, codes
from pagedopt.formats.int8 import BLOCK

MEASURES = ("kernels", "formats")
#: The name of the experiment's note.
NOTE = "int8"
CPU_ONLY = True
PLAY, TRAINING = "play", "training"
BLOCKS, STEPS, MARKS = 64, 5000, (100, 1000, 5000)
PAIRS = ((0.9, 0.95), (0.9, 0.999), (0.99, 0.999))
#: Of a block's elements every so many; sizes beside the block's; and steps between two hits, with the size in between.
EVERY, SIZES, HIT, BETWEEN = 32, (1e-4, 1e-5, 1e-6), 100, 1e-3
LR = 1e-3
#: Of the training: rows of the embedding and their width, words of a context, a batch, words that are foretold.
ROWS, WIDTH, CONTEXT, BATCH, TARGETS, TRAINED = 50_000, 32, 4, 512, 1024, 2000
#: Rows that come so often at most are rare.
RARE = 10
#: In the training, which has a hundred times the elements.
IN_TRAINING = (FLOAT32, RIVAL, "m root 2, to the nearest (before)", OURS)


def measure(run: Run) -> Iterator[Row]:
    """A row per pair of decays and code of the play, and a row per code of the training."""
    for pair in run.each(PAIRS):
        yield from played(run, pair)
    yield from trained(run)


def played(run: Run, pair: tuple[float, float]) -> Iterator[Row]:
    """How far elements without a gradient went, what is left of their momentum, and the largest updates."""
    steps, marks = run.size((STEPS, MARKS), (8, (2, 4, 8)))
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
            for key, value in largest(update, ended if step > 1 else None, small, tied).items():
                row[key] = max(row.get(key, 0.0), value)
            if step == 1 or step in marks:
                left = float(twin.moment("exp_avg")[ended].abs().mean())
                first.setdefault(name, left)
                if step > 1:
                    row[f"left after {marks.index(step)}"] = left / first[name]
                    row[f"far after {marks.index(step)}"] = float(far[name][ended].abs().mean())
    for name, row in found.items():
        gone = far[name][ended].abs()
        yield {"case": PLAY, "beta1": pair[0], "beta2": pair[1], "steps": steps, "code": name, **row,
               "mean": float(gone.mean()), "most": float(gone.max())}  # fmt: skip


def largest(
    update: torch.Tensor, ended: torch.Tensor | None, small: torch.Tensor, tied: torch.Tensor
) -> dict[str, float]:
    """The largest updates of the elements of each kind."""
    sizes = {f"small {size:g}": float(update[small[i :: len(SIZES)]].abs().max()) for i, size in enumerate(SIZES)}
    gone = {} if ended is None else {"ended": float(update[ended].abs().max())}
    return {**gone, **sizes, "tied": float(update[tied].abs().max())}


def words(needed: int) -> torch.Tensor:
    """Numbers of the words of Python's standard library, in the order in which they first come, up to ``ROWS``."""
    known: dict[str, int] = {}
    found: list[int] = []
    for path in sorted(Path(tokenize.__file__).parent.rglob("*.py")):
        text = path.read_text(errors="ignore")
        for word in re.findall(r"\w+|[^\w\s]", text):
            number = known.setdefault(word, len(known))
            if number < ROWS:
                found.append(number)
        if len(found) >= needed:
            break
    return torch.tensor(found[:needed])


class Words(nn.Module):
    """An embedding whose means of a few words foretell the next one, if it is among the most frequent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.inner, self.outer = nn.Linear(CONTEXT * WIDTH, 128), nn.Linear(128, TARGETS + 1)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.outer(torch.tanh(self.inner(self.embedding(context).flatten(1))))
        return rows


def trained(run: Run) -> Iterator[Row]:
    """The error of the embedding's update, and how far its rare rows go."""
    steps, batch = run.size((TRAINED, BATCH), (4, 16))
    text = words(steps * (batch + CONTEXT + 1))
    often = [number for number, _ in Counter(text.tolist()).most_common(TARGETS)]
    target = torch.full((ROWS,), TARGETS)
    target[often] = torch.arange(len(often))
    torch.manual_seed(0)
    model = Words()
    leader = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.999), weight_decay=0)
    rows = nn.Parameter(model.embedding.weight.detach())
    twins = {name: Twin([rows], "AdamW", (0.9, 0.999), code)
             for name, code in codes("AdamW", BOTH).items() if name in IN_TRAINING}  # fmt: skip
    hits, far = torch.zeros(ROWS), {name: torch.zeros(ROWS * WIDTH) for name in twins}
    errors: dict[str, list[float]] = {name: [] for name in twins}
    worst = dict.fromkeys(twins, 0.0)
    for step in range(steps):
        piece = text[step * (batch + CONTEXT + 1) :][: batch + CONTEXT]
        context = piece.unfold(0, CONTEXT, 1)[:batch]
        loss = nn.functional.cross_entropy(model(context), target[piece[CONTEXT:]])
        leader.zero_grad()
        loss.backward()
        hits[context.unique()] += 1
        right: torch.Tensor | None = None
        for name, twin in twins.items():
            twin.step([model.embedding.weight.grad])
            update = twin.update
            right = update if right is None else right
            far[name] += LR * update
            worst[name] = max(worst[name], float(update.abs().max()))
            if step >= steps // 2 and step % 10 == 0:
                errors[name].append(float(100 * (update - right).norm() / right.norm()))
        leader.step()
    rare = (hits > 0) & (hits <= RARE)
    for name in twins:
        gone = far[name].view(ROWS, WIDTH)[rare].abs()
        yield {"case": TRAINING, "beta1": 0.9, "beta2": 0.999, "steps": steps, "code": name, "loss": loss.item(),
               "rows": int((hits > 0).sum()), "rare": int(rare.sum()), "mean": float(gone.mean()),
               "most": float(gone.max()), "worst": worst[name],
               "error": sum(errors[name]) / max(1, len(errors[name]))}  # fmt: skip


def derive(rows: Rows) -> Rows:
    """Distances and updates beside float32's."""
    found = Rows()
    for row in rows:
        exact = rows.where(case=row["case"], beta1=row["beta1"], beta2=row["beta2"], code=FLOAT32)[0]
        more = {"of_mean": row["mean"] / exact["mean"], "of_most": row["most"] / exact["most"]}
        if "tied" in row:
            more["of_tied"] = row["tied"] / exact["tied"]
        found.append({**row, **more, "off": 100 * abs(more["of_mean"] - 1)})
    return found


_ABOUT: dict[str, Any] = {"state": "code", "β1": "beta1", "β2": "beta2"}


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    gone: dict[str, Column] = {**_ABOUT, "distance, mean": "mean", "largest": "most",
        "mean ÷ float32's": ratio("of_mean"), "largest ÷ float32's": ratio("of_most"),
        "largest update": "ended", "momentum left after 100": "left after 0", "1,000": "left after 1",
        "5,000": "left after 2"}  # fmt: skip
    play, title = rows.where(case=PLAY), "No gradient any more: {steps:,} steps"
    page.table(title, Rows(row for row in play if row["code"] in (FLOAT32, RIVAL, OURS)), gone)
    page.detail.table(title, play, gone)
    page.detail.table("Small beside its block, and tied rows: the largest update in {steps:,} steps", play,
        {**_ABOUT, "1e-4 of its block": "small 0.0001", "1e-5": "small 1e-05", "1e-6": "small 1e-06",
        "tied": "tied", "tied ÷ float32's": ratio("of_tied")})  # fmt: skip
    title = "An embedding of 50,000 rows of 32: {rare:,} of the {rows:,} that came are rare, {steps:,} steps"
    page.detail.table(title, rows.where(case=TRAINING),
        {"state": "code", "error of the update": percent("error"), "largest update": "worst",
        "rare rows: distance, mean": "mean", "largest": "most", "mean ÷ float32's": ratio("of_mean"),
        "largest ÷ float32's": ratio("of_most")})  # fmt: skip
    page.bar("no gradient any more: mean distance, off float32's", rows.where(case=PLAY, code=OURS), "off",
        at_most=5, unit="%")  # fmt: skip
    page.bar("no gradient any more: largest distance ÷ float32's", rows.where(case=PLAY, code=OURS),
        "of_most", at_most=2, unit="x")  # fmt: skip
    page.bar("tied rows: largest update ÷ float32's", rows.where(case=PLAY, code=OURS), "of_tied",
        at_most=3.5, unit="x")  # fmt: skip
    page.bar("rare rows of a training: mean distance, off float32's", rows.where(case=TRAINING, code=OURS),
        "off", at_most=5, unit="%")  # fmt: skip
    page.bar("rare rows of a training: largest ÷ float32's", rows.where(case=TRAINING, code=OURS),
        "of_most", at_most=2, unit="x")  # fmt: skip
