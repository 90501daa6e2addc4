"""What ``README.md`` and ``notes/usage.md`` say in numbers, and a picture of budgets, made of kept results of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.columns import ms
from experiments.comparing import best
from experiments.kept import KEPT, ROOT, fill, markdown
from experiments.lab import Row, Rows, number
from experiments.lecture.page import Results
from experiments.overlap.seven_billion import WITHIN
from experiments.paging.rivals import ALONE, BACK, FUSED, RIVAL, RIVAL_8BIT, SAME, WARM
from experiments.paging.sweep import BOTH, STEP, TIME
from experiments.pictures import BLUE, GRAY, PAGE, Lines, onto, save
from experiments.step.clip_and_scale import CAPTURED
from experiments.step.close_to_a_copy import BOTH_WAYS, STOCHASTIC
from experiments.works.finetunes import BACKWARD, RESIDENT
from experiments.works.models import BITS_8, COPY, GRAPH, OURS
from experiments.works.models import FUSED as FUSED_STEP
from pagedopt import Estimate, estimate
from pagedopt.commands.tables import new_figure

FOLDER, PICTURE = ROOT, KEPT / "budgets.png"
STAGED = "mapped, staged"
#: Budgets that are shown.
SHARES = (0.0, 0.5, 1.0)
OFFLOAD = "torchao CPUOffloadOptimizer"
HERE = {1.0: "pagedopt, all on the device", 0.0: "pagedopt, none on the device"}
#: Steps of ``in_8_bits`` that are shown, by place: what is rounded as it is by default.
IN_8_BITS = {"resident": STOCHASTIC, "away": f"{STOCHASTIC}, staged"}
RIVALS = {
    FUSED: "torch fused",
    OFFLOAD: f"{OFFLOAD}, backward and step",
    RIVAL: RIVAL,
    RIVAL_8BIT: f"{RIVAL_8BIT}, 8-bit state",
}
#: Works of ``fused_step`` by what the table calls them.
WORKS = {
    "gpt2": "GPT-2, 124 M, float32",
    "gpt2-bf16": "GPT-2, 124 M, bfloat16 with state in float32",
    "1b": "1 B in 60 tensors, float32",
    "1000": "1,000 tensors of 2 x 3",
}
#: Cases of ``seven_billion`` by what the front page calls them.
FINETUNES = {
    RESIDENT: "torch fused, bfloat16 state on the GPU",
    "torch_hooks": "the same, an optimizer per parameter, stepped in hooks",
    BACKWARD: "**pagedopt, 8-bit state on the host, updated within the backward**",
    "forward": "pagedopt, the same, updated under the next forward",
    "bitsandbytes": "bitsandbytes PagedAdamW8bit",
    "torchtune": "the same, per parameter in hooks (torchtune's recipe)",
    "torchao": f"torchao {OFFLOAD.split()[-1]}, gradients offloaded",
    "optimi": "optimi AdamW, gradient release, Kahan sums",
}
PUSHED_OUT = "torchtune_out"
RIVAL_PACKAGES = ("bitsandbytes", "torchao", "torch-optimi")
#: Bytes of a card of 24 GiB.
CARD = 24 << 30
CLOCKS = ("gpu", "wall")
CASES = {"pagedopt": OURS, "torch fused": FUSED_STEP, "a copy of its bytes": COPY}


def main() -> int:
    """Fill both pages and draw the picture."""
    results = Results()
    for page in PAGES:
        fill(FOLDER / page, blocks(results, page))
    begin = len(results.asked)
    rows = of_one_run(results)
    commits = dict.fromkeys(str(results.part(shown)[0]["commit"]) for shown in results.asked[begin:])
    file = drawn(rows, f"{gpu(results)}, measured at {' and '.join(commits)}")
    print(f"filled: {', '.join(PAGES)}" + (f"; drawn: {file}" if file else "; no picture: pip install matplotlib"))
    return 0


def asked(results: Results, shown: str) -> Rows:
    """Rows of ``experiment.question``, which have to be kept."""
    if not (rows := results.rows(shown)):
        raise LookupError(f"no results of {shown} are kept in {results.folder}")
    return rows


def budgets(results: Results) -> Rows:
    """Those of :func:`of_one_run`, and ours with 8-bit state."""
    found = [*of_one_run(results)]
    eight = asked(results, "in_8_bits.in_8_bits").where(device="cuda")
    for place, case in IN_8_BITS.items():
        (row,) = eight.where(place=place, case=case)
        nbytes = round(BITS_8 * row["numel"])
        here, away = (nbytes, 0) if place == "resident" else (0, nbytes)
        name = f"{HERE[float(place == 'resident')]}, 8-bit state"
        found.append({"name": name, "share": 1.0, "here": here, "away": away, **in_ms(row)})
    return Rows(sorted(found, key=lambda row: row["ms"]))


def of_one_run(results: Results) -> Rows:
    """A row per budget and per rival, the fastest first: bytes of state here and away between steps, and times."""
    sweep, rivals = asked(results, "paged_state.sweep"), asked(results, "paged_state.rivals")
    state = sweep[0]["state_bytes"]
    found = [
        {"name": HERE.get(row["share"], f"pagedopt, {100 * row['share']:.0f} % on the device"), "share": row["share"],
         "here": state - row["host_bytes"], "away": row["host_bytes"], **in_ms(row)}
        for row in sweep.where(kind=TIME, case=STEP, way=STAGED)
        if row["share"] in SHARES
    ]  # fmt: skip
    for row in rivals:
        if row["name"] in (FUSED, OFFLOAD) or row["what"] == SAME:
            here, away = (state, 0) if row["name"] == FUSED else (0, row.get("paged_bytes", state))
            found.append({"name": RIVALS[row["name"]], "share": None, "here": here, "away": away, **in_ms(row)})
    return Rows(sorted(found, key=lambda row: row["ms"]))


def in_ms(row: Row) -> Row:
    """Times of a step: by the wall, by the GPU (None: it holds the host up), and of a paged rival its step alone."""
    return {"ms": ms("wall")(row), "gpu_ms": ms("gpu")(row), "alone": ms("alone")(row)}


def blocks(results: Results, page: str = "") -> dict[str, str]:
    """Name → what stands between its markers, a table and how old it is; of one page, or of all."""
    found = {}
    for make in PAGES[page] if page else [make for makers in PAGES.values() for make in makers]:
        begin = len(results.asked)
        text = make(results)
        found[make.__name__.replace("_", " ")] = f"{text}\n\n{age(results, results.asked[begin:])}"
    return found


def age(results: Results, shown: Sequence[str]) -> str:
    """A sentence for each experiment and commit of what is shown."""
    found = dict.fromkeys((name.partition(".")[0], str(results.part(name)[0]["commit"])) for name in shown)
    return " ".join(f"`{name}` measured at {commit}." for name, commit in found)


def seven_billion(results: Results) -> str:
    """What 7 B parameters take of a card, reckoned: with all state on it, and with none."""
    near = estimate("7B", param_dtype="bfloat16")
    away = estimate("7B", param_dtype="bfloat16", device_budget=0)
    eight = estimate("7B", param_dtype="bfloat16", device_budget=0, state_format="int8")
    shares = reached(results)
    ways = (
        ("all on the card", near, near.near_bytes, shares["resident"]),
        ("state on the host: `device_budget=0`", away, away.near_bytes, shares["away"]),
        ("the same, and [an optimizer per parameter](#when-the-state-does-not-fit)", away, alone(away), shares["away"]),
        ('the same, and `state_format="int8"`', eight, alone(eight), shares["int8"]),
    )
    lines = [
        (name, number(taken / 2**30), number((CARD - taken) / 2**30) if taken < CARD else "does not fit",
         number(1e3 * (plan.seconds or 0.0)), number(1e3 * (plan.seconds or 0.0) / share),
         number(plan.away_bytes / 2**30))
        for name, plan, taken, share in ways
    ]  # fmt: skip
    titles = ("AdamW, 7 B parameters in bfloat16", "GiB on the card", "left for activations",
              "ms of all updates, ideal", "ms, expected",
              "GiB of state on the host")  # fmt: skip
    machine = near.rates.machine.partition(",")[0].removeprefix("an ")
    resident, staged, int8 = (f"{100 * share:.0f} %" for share in shares.values())
    (step,) = asked(results, "in_8_bits.in_8_bits").where(place="away", case=IN_8_BITS["away"])
    by_wall = 7e9 / step["numel"] * step["wall"]["median"] / 1e3
    return (
        f"{markdown(titles, lines)}\n\nCalculated by `pagedopt plan`, not measured. State is bfloat16 (last row: "
        f"int8), on the host in page-locked RAM.\n*Ideal* is by the rates of an {machine}; *expected* is by the share "
        f"of them that measured steps reach:\n{resident} on the card, {staged} with float32 state on the host, {int8} "
        f"with 8-bit state there (GPU clock; by the wall the last row takes {number(by_wall)} ms).\n"
        "A slower link takes longer. Parameters and gradients alone take "
        f"{number((away.param_bytes + away.grad_bytes) / 2**30)} GiB, so the lower "
        "two rows update each parameter within the backward and free its\ngradient. The largest gradient comes on top."
    )


def reached(results: Results) -> dict[str, float]:
    """Of the rates by which ``plan`` reckons, what part did steps reach?  On the card, away, and away in 8 bits."""
    near = asked(results, "in_16_bits.in_16_bits").number("share", case=OURS)
    (step,) = asked(results, "paged_state.sweep").where(kind=TIME, case=STEP, way=STAGED, share=0.0)
    copies = asked(results, "paged_state.link").first(what=BOTH)  # the step's own were made at another time
    eight = asked(results, "in_8_bits.in_8_bits").where(place="away")
    rates = [eight.number("rate", case=case) for case in (IN_8_BITS["away"], BOTH_WAYS)]
    assert near is not None
    assert copies is not None
    staged = 2 * step["host_bytes"] / copies["moved"] * best(copies)["median"] / step["gpu"]["median"]
    return {"resident": near / 100, "away": staged, "int8": (rates[0] or 0.0) / (rates[1] or 1.0)}


def alone(plan: Estimate) -> int:
    """Bytes on the card where no gradient outlives its update."""
    return plan.near_bytes - plan.grad_bytes


def numbers(results: Results) -> str:
    """The front page's table: a full fine-tune in one run, with its card, date and versions."""
    rows = asked(results, "seven_billion.seven_billion").where(card="", ended=None, numel=WITHIN["numel"])
    by_batch = {batch: {row["case"]: row for row in rows.where(batch=batch)} for batch in (4, 1)}
    large, small = by_batch[4], by_batch[1]
    lines = [
        (name, f"{large[case]['taken']:.1f}", f"{large[case]['tokens_s']:,.0f}") for case, name in FINETUNES.items()
    ]
    ours, torchs = large[BACKWARD], large[RESIDENT]
    result = results.of("seven_billion")
    assert result is not None
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", *RIVAL_PACKAGES))
    return (
        f"**With 8-bit state, {share(ours['tokens_s'], torchs['tokens_s'])} of the speed of torch's fused AdamW in "
        f"{share(ours['taken'], torchs['taken'])} of its memory.** A full fine-tune on one {machine['gpu']}: "
        f"{ours['numel'] / 1e9:.2f} B\nbfloat16 parameters in Llama's shapes, rounded to nearest, checkpointed blocks, "
        f"batches of {ours['batch']} x {ours['tokens']:,} tokens.\n\n"
        f"{markdown(('optimizer', 'GiB on the GPU', 'tokens/s'), lines)}\n\n"
        f"At batch 1 the update is hidden only in part: {number(ms('time')(small[BACKWARD]))} ms an iteration, torch's "
        f"{number(ms('time')(small[RESIDENT]))}, in {small[BACKWARD]['taken']:.1f} GiB. 8-bit state is rounded, so "
        f"losses\ndiffer from float32's. Memory is by the driver. bitsandbytes' pages stay on the GPU while "
        f"there is room; pushed out,\ntorchtune's recipe reaches {large[PUSHED_OUT]['tokens_s']:,.0f} tokens/s. "
        f"No 24 GB card was measured; links slower than PCIe 5.0 x16 take longer.\n"
        f"{machine['when'][:10]}, {versions}."
    )


def share(part: float, whole: float) -> str:
    """In percent."""
    return f"{100 * part / whole:.0f} %"


def fused_over_ours(results: Results) -> float:
    """How many times as long torch's fused step takes as ours, by the GPU, with all state on the device."""
    near = asked(results, "paged_state.sweep").number("gpu", case=STEP, way=STAGED, share=1.0)
    fused = asked(results, "paged_state.rivals").number("gpu", name=FUSED)
    assert near is not None
    assert fused is not None
    return fused / near


def gradients(results: Results) -> float:
    """Milliseconds that all gradients take on their way down to the host, at the rate of a copy."""
    down = asked(results, "paged_state.link").first(what="down")
    assert down is not None
    return float(4 * asked(results, "paged_state.rivals")[0]["numel"] / down["moved"] * best(down)["median"] / 1e3)


def pushed_out(results: Results, name: str) -> float:
    """Milliseconds by the wall in which a rival's pages go back to the host."""
    (row,) = asked(results, "paged_state.rivals").where(name=name, what=BACK)
    return float(row["wall"]["median"] / 1e3)


def wall(row: Row) -> str:
    """Milliseconds by the wall."""
    return number(row["ms"]) + (f", its step alone {number(row['alone'])}" if row["alone"] else "")


def memory_and_time(results: Results) -> str:
    """All, half and none of the state on the device, and rivals."""
    rivals = asked(results, "paged_state.rivals")
    wide, narrow = ({row["what"]: row for row in rivals.where(name=name)} for name in (RIVAL, RIVAL_8BIT))
    back = [number(pushed_out(results, name)) for name in (RIVAL, RIVAL_8BIT)]
    warm = [number(ms("wall")(row[WARM])) for row in (wide, narrow)]
    ring = asked(results, "paged_state.memory").number("ring", way=STAGED, share=0.0)
    assert ring is not None
    lines = [
        (row["name"], number(row["here"] / 2**30), number(row["away"] / 2**30),
         wall(row),
         number(row["gpu_ms"]))
        for row in budgets(results)
    ]  # fmt: skip
    (again,) = asked(results, "in_8_bits.in_8_bits").where(device="cuda", place="resident", case=OURS)
    title = f"AdamW, {rivals[0]['numel'] / 1e6:,.0f} M float32 parameters"
    said = (
        f"{gpu(results)}. Ours with 8-bit state comes from another run ([int8](int8.md#how-fast-is-a-step-with-it)), "
        f"in which our float32 step on the device takes "
        f"{number(ms('wall')(again))} ms by the wall and {number(ms('gpu')(again))} by the GPU.\nState on "
        f"the host is streamed through {ring / 2**20:.0f} MiB of buffers on the device.\n"
        "Rows were measured in separate processes; compare the GPU column. "
        f"By the GPU torch's fused step takes {fused_over_ours(results):.2f} times as long as ours.\ntorchao's row is "
        f"a backward and a step. About {gradients(results):.0f} ms of it are copies of gradients to the host, "
        "which in training overlap the backward.\nbitsandbytes leaves its pages on the "
        f"device. We push them out after each step ({back[0]} ms, {back[1]} in 8 bits); a step whose pages are still "
        f"there takes {warm[0]} ms, {warm[1]} in 8 bits.\nIts 32-bit step takes "
        f"{wide[ALONE]['over']:.2f} times as long as ours with all state on the host, {wide[SAME]['over']:.2f} times "
        "with its pages pushed out. Its 8-bit step moves a quarter of the bytes, and its results differ from float32's."
    )
    titles = (title, "GiB of state on the device", "on the host", "ms a step, wall", "ms a step, GPU")
    return f"{markdown(titles, lines)}\n\n{said}"


def resident(results: Results) -> str:
    """Steps whose state is on the device."""
    rows = asked(results, "fused_step.close_to_a_copy").where(device="cuda")
    lines = []
    for key, name in WORKS.items():
        found = [[rows.number(clock, key=key, case=case) for clock in CLOCKS] for case in CASES.values()]
        lines.append((name, *map(both, found)))
    replays = asked(results, "captured_step.captured_step").where(tensors=1000)
    times = [[replays.number(clock, case=case) for clock in CLOCKS] for case in (CAPTURED, GRAPH)]
    lines.append((f"{WORKS['1000']}, in a CUDA graph", *map(both, times), ""))
    table = markdown(("AdamW, all state on the device: GPU / wall, µs", *CASES), lines)
    eager = [number(replays.number("wall", case=case)) for case in (OURS, FUSED_STEP)]
    narrow = asked(results, "in_16_bits.in_16_bits").where(device="cuda")
    return (
        f"{table}\n\nIn bfloat16 torch fused keeps its state in bfloat16 and moves 14 bytes an element; ours and the "
        f"copy move 22. The faster step on the GPU is {shorter(rows.where(key='gpt2-bf16'))}; with bfloat16 "
        f"state in both it is {shorter(narrow)} ([in 16 bits](int8.md#everything-in-16-bits)).\n"
        "The CUDA graphs come from another run ([captured_step](captured_step.md)), in which "
        f"an eager step takes {eager[0]} µs by the wall, torch's {eager[1]} µs. A compiled step is in "
        "[optimizer_ladder](optimizer_ladder.md)."
    )


def both(times: Sequence[float | None]) -> str:
    """Two clocks' times; nothing where one is missing."""
    return " / ".join(map(number, times)) if all(times) else ""


def shorter(rows: Rows) -> str:
    """Whose step takes less GPU time."""
    ours, fused = (rows.number("gpu", case=CASES[name]) for name in ("pagedopt", "torch fused"))
    assert ours is not None
    assert fused is not None
    return "ours" if ours < fused else "torch's"


def link(results: Results) -> str:
    """What is between device and host, and what the device has."""
    rates = {row["what"]: row["moved"] / best(row)["median"] / 1e3 for row in asked(results, "paged_state.link")}
    return (
        f"On that {gpu(results)} the link moves {number(rates[BOTH])} GB/s, both ways together, and the memory of the "
        f"device {number(rates['HBM copy'])}."
    )


def gpu(results: Results, experiment: str = "paged_state") -> str:
    """The name of the card that an experiment ran on."""
    result = results.of(experiment)
    assert result is not None
    return str(result["machine"]["gpu"])


BY_BUDGET = "pagedopt, by device_budget"


STEPS_BY_STATE = Lines(
    title="AdamW, {about}",
    unit="ms a step, wall",
    x="gib",
    y="ms",
    each="line",
    log="y",
    zero="x",
    label="GiB of state on the host",
    colors=lambda name: BLUE if name == BY_BUDGET else GRAY,
    inches=3.8,
)


def drawn(rows: Rows, about: str) -> Path | None:
    """A line of ours, and a mark for each rival; None without matplotlib."""
    if (figure := new_figure(PAGE, 5)) is None:
        return None
    shown = Rows(point for row in rows for point in points(row, about))
    title = "A step takes longer with each GiB of state on the host, ours the least in float32"
    onto(figure, shown, [STEPS_BY_STATE], title)
    return save(figure, PICTURE, rows)


def points(row: Row, about: str) -> list[Row]:
    """A step; and of a rival whose pages we push out, the step alone."""
    named = {"about": about, "gib": row["away"] / 2**30}
    line = row["name"] if row["share"] is None else BY_BUDGET
    alone = [{**named, "line": f"{row['name']}, step alone", "ms": row["alone"]}] if row["alone"] else []
    return [{**named, "line": line, "ms": row["ms"]}, *alone]


#: Page, below the root → what makes its blocks.
PAGES: dict[str, Sequence[Callable[[Results], str]]] = {
    "README.md": (numbers,),
    "notes/usage.md": (seven_billion, memory_and_time, resident, link),
}
