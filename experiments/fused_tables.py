"""Tables, bars and the plot made from the results of :mod:`experiments.fused_step`."""

from __future__ import annotations

from typing import Any

from experiments import report
from experiments.report import Bar, number

Rows = list[tuple[str, ...]]
Shown = tuple[tuple[str, ...], Rows]
OURS, FUSED, COPY = "PagedAdamW", "torch fused", "copy of its bytes"


def _step(result: dict[str, Any], key: str, device: str) -> dict[str, Any] | None:
    """Times by contender of one work, or None if it was not measured."""
    for step in result["steps"]:
        if step["key"] == key and step["device"] == device:
            return dict(step["times"])
    return None


def median(timing: dict[str, Any], metric: str | None = None) -> float:
    """The median of a metric; by default the GPU's time, or the wall time where there is none."""
    chosen = timing[metric] if metric else timing["gpu"] or timing["wall"]
    return float(chosen["median"])


def _ratio(
    result: dict[str, Any], key: str, rival: str, *, device: str = "cuda", metric: str | None = None
) -> float | None:
    """Time of another contender over ours; None where one was not measured."""
    times = _step(result, key, device)
    if times is None or rival not in times:
        return None
    return median(times[rival], metric) / median(times[OURS], metric)


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def bars(result: dict[str, Any]) -> list[Bar]:
    """What must be reached, and what was measured of it."""
    cuda = result["device"] == "cuda"
    alone = result["alone"]
    fresh = result["first step"]
    first = {name: fresh[name]["median"] if cuda else None for name in ("cold", "warm")}

    def fused(key: str, device: str = "cuda", metric: str | None = None) -> float | None:
        return _ratio(result, key, FUSED, device=device, metric=metric)

    return [
        Bar("AdamW fp32, GPT-2, speed over torch fused", fused("gpt2"), 1.4, "x", True),
        Bar("AdamW fp32, GPT-2, share of HBM copy", _percent(_ratio(result, "gpt2", COPY)), 93, "%", True),
        Bar("AdamW fp32, 1 B, share of HBM copy", _percent(_ratio(result, "1b", COPY)), 94, "%", True),
        Bar("1,000 x (2, 3), wall, speed over torch fused", fused("1000", metric="wall"), 8, "x", True),
        Bar("5,000 x (2, 3), wall, speed over torch fused", fused("5000", metric="wall"), 8, "x", True),
        Bar("bf16, fp32 state, GPT-2, share of HBM copy", _percent(_ratio(result, "gpt2-bf16", COPY)), 90, "%", True),
        Bar("host time of step(), 148 tensors, alone", alone[OURS]["median"] if cuda else None, 120, "µs"),
        Bar("refreshing 1,000 unchanged tensors", result["refresh"]["one list"]["median"], 250, "µs"),
        Bar("CPU, 5,000 x (2, 3), speed over torch fused", fused("5000", "cpu"), 5, "x", True),
        Bar("CPU, 50 M in 12 tensors, speed over torch fused", fused("50m", "cpu"), 0.95, "x", True),
        Bar("first step, cold kernel cache", first["cold"], 2, "s"),
        Bar("first step, warm kernel cache", first["warm"], 0.3, "s"),
        Bar("import of pagedopt.PagedAdamW, after torch", fresh["import"]["best"], 0.3, "s"),
    ]


def tables(result: dict[str, Any]) -> dict[str, Shown]:
    """Every table by its title."""
    shown: dict[str, Shown] = {}
    fresh = result["first step"]
    for step in result["steps"]:
        title = f"{step['work']}, {step['device']}: {step['numel']:,} parameters, {step['bytes'] / 1e9:.3g} GB a step"
        shown[title] = _contenders(step)
    rows: Rows = [(name, f"{number(stats['median'])} µs") for name, stats in result["alone"].items()]
    shown["step() over 148 small tensors, nothing else in between"] = ("optimizer", "host"), rows
    rows = [(name, f"{number(stats['median'])} µs") for name, stats in result["refresh"].items()]
    shown["refresh of 1,000 unchanged tensors"] = ("lists", "host"), rows
    rows = [
        (f"first step, {name} cache", f"{stats['median']:.2f} s ({stats['p10']:.2f} to {stats['p90']:.2f})")
        for name, stats in fresh.items()
        if name != "import"
    ]
    known = {"of pagedopt.PagedAdamW": fresh["import"], **result["imports"]}
    rows += [(f"import {name}", f"{stats['best']:.3f} s (best of {stats['n']})") for name, stats in known.items()]
    shown["fresh processes"] = ("what", "seconds"), rows
    return shown


def _contenders(step: dict[str, Any]) -> Shown:
    """One row per contender: its times, bytes per second, share of the copy and ratio to ours."""
    times = step["times"]
    copied = median(times[COPY]) if COPY in times else None
    rows: Rows = []
    for name, timing in times.items():
        taken = median(timing)
        rows.append((
            name, number(timing["host"]["median"]), number(timing["gpu"]["median"] if timing["gpu"] else None),
            f"{number(timing['wall']['median'])} ({number(timing['wall']['p10'])} to {number(timing['wall']['p90'])})",
            number(step["bytes"] / taken / 1e3), "-" if copied is None else f"{100 * copied / taken:.1f} %",
            f"{taken / median(times[OURS]):.2f} x", f"{step['errors'][name]:.1e}" if name in step["errors"] else "",
        ))  # fmt: skip
    headings = ("contender", "host µs", "GPU µs", "wall µs (p10 to p90)", "GB/s", "of the copy", "÷ ours", "error")
    return headings, rows


def sections(result: dict[str, Any]) -> dict[str, str]:
    """What :func:`experiments.report.fill` puts into the note."""
    shown = "\n\n".join(f"**{title}**\n\n{report.markdown(*table)}" for title, table in tables(result).items())
    left_out = "\n".join(f"- {line}" for line in result["left_out"]) or "nothing"
    return {
        "machine": report.machine_line(result), "bars": report.bars_markdown(result),
        "tables": shown, "left out": left_out,
    }  # fmt: skip


def plot_steps(figure: Any, result: dict[str, Any]) -> None:
    """Time of a step by contender, per work, with the copy of its bytes as a line."""
    steps = result["steps"]
    columns = 2 if len(steps) > 1 else 1
    rows = -(-len(steps) // columns)
    figure.set_size_inches(12, 1 + 2.8 * rows)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes in places[len(steps) :]:
        axes.set_axis_off()
    for axes, step in zip(places, steps, strict=False):
        times = {name: t for name, t in step["times"].items() if name != COPY}
        taken = [median(t) / 1e3 for t in times.values()]
        spread = [[median(t) / 1e3 - (t["gpu"] or t["wall"])["p10"] / 1e3 for t in times.values()],
                  [(t["gpu"] or t["wall"])["p90"] / 1e3 - median(t) / 1e3 for t in times.values()]]  # fmt: skip
        colors = ["tab:blue" if name.startswith(OURS) else "tab:gray" for name in times]
        axes.barh(list(times), taken, xerr=spread, color=colors)
        if COPY in step["times"]:
            axes.axvline(median(step["times"][COPY]) / 1e3, color="tab:red", label=COPY)
            axes.legend(fontsize="small")
        if max(taken) > 30 * min(taken):
            axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_title(f"{step['work']}, {step['device']}", fontsize="medium")
        axes.set_xlabel("ms")
