"""A note's tables: what stands between its markers is made of a file of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.question import Experiment, Question
from experiments.harness.revision import ROOT, check_source, refuse, words
from experiments.harness.rows import Rows, newest, of_questions, read
from experiments.harness.show import Verdict

NOTES = ROOT / "notes"
UNMEASURED = "not measured in this run"
#: Cells that say nothing.
NOTHING = ("", "-")


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without columns that are empty in every line.

    >>> print(markdown(["step", "µs", "GPU µs"], [["ours", "7", "-"], ["torch", "9", "-"]]))
    | step | µs |
    |---|---:|
    | ours | 7 |
    | torch | 9 |
    """
    kept = [i for i in range(len(headings)) if not lines or any(line[i] not in NOTHING for line in lines)]
    cells = [[line[i].replace("|", "\\|").replace("\n", "<br>") for i in kept] for line in (headings, *lines)]
    top, *rest = ("| " + " | ".join(line) + " |" for line in cells)
    return "\n".join([top, f"|---{'|---:' * (len(kept) - 1)}|", *rest])


def machine_line(result: Mapping[str, Any], experiment: Experiment) -> str:
    """A sentence about the machine; which questions are of another source than the last; what has changed since."""
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    gpu = f"{m['gpu']} (driver {m['driver']}, CUDA {m['torch_cuda']})" if result["device"] != "cpu" else "CPU only"
    quick = " **A `--quick` run: the numbers mean nothing.**" if result.get("quick") else ""
    return (
        f"Measured {m['when'][:10]} at {words(m)}: {gpu}; {m['processor']}, {m['cores']} cores; "
        f"Python {m['python']}, {versions}.{earlier(result)}{changes(result, experiment)}{quick}"
    )


def earlier(result: Mapping[str, Any]) -> str:
    """Which questions are of another source than the last: " Of commit abc1234: leaks, price."."""
    m = result["machine"]
    others: dict[str, list[str]] = {}
    for name, part in result.get("parts", {}).items():
        on = part.get("machine", m)
        there = f" on {on['gpu']}s of one host, {on['cores']} cores" if on is not m else ""
        if "commit" in part and (there or words(part) != words(m)):
            others.setdefault(words(part) + there, []).append(name)
    return "".join(f" Of {source}: {', '.join(names)}." for source, names in others.items())


def changes(result: Mapping[str, Any], experiment: Experiment) -> str:
    """What has changed since it was measured, and of which questions; nothing of toys.

    " Changed since: kernels, step (close_to_a_copy, host_time); clock (first_step)."
    """
    found: dict[str, list[str]] = {}
    for question in experiment.questions:
        part = result.get("parts", {}).get(question.name)
        if part is not None and not result.get("quick") and (topics := question.changed(part)):
            found.setdefault(", ".join(topics), []).append(question.name)
    said = "; ".join(f"{topics} ({', '.join(names)})" for topics, names in found.items())
    return f" Changed since: {said}." if said else ""


def whose(experiment: Experiment) -> str:
    """What tells its machine, bars and left out from another's on a page that has another name: " in_8_bits"."""
    return "" if experiment.note == experiment.name else f" {experiment.name}"


def sections(result: Mapping[str, Any], experiment: Experiment) -> dict[str, str]:
    """Name → content: ``machine``, ``bars``, ``left out``, one of every question, and those that texts name.

    The first three end in what :func:`whose` says.
    """
    fields = ("work", "measured", "limit", "unit", "at_least")
    verdicts = [Verdict(**{name: bar[name] for name in fields}).words() for bar in result["verdicts"]]
    mine = whose(experiment)
    found = {
        f"machine{mine}": machine_line(result, experiment),
        f"left out{mine}": "\n".join(f"- {line}" for line in dict.fromkeys(result["left_out"])) or "nothing",
    }
    if verdicts:
        found[f"bars{mine}"] = markdown(("work", "bar", "measured", "verdict"), verdicts)
    known = of_questions(result, experiment)
    for question in experiment.questions:
        rows, texts = known.get(question.name), question.listed("TEXTS")
        if question.listed("TABLES") or any(text.section == question.name for text in texts):
            found[question.name] = UNMEASURED if rows is None else _of_question(question, rows)
        for text in texts:
            if text.section != question.name:
                said = UNMEASURED if rows is None else text.say(rows)
                found[text.section] = "\n".join(filter(None, (found.get(text.section), said)))
    return found


def _of_question(question: Question, rows: Rows) -> str:
    """Its tables, each under its title, and what it says of itself."""
    blocks = [
        f"**{title}**\n\n{markdown(headings, lines)}"
        for table in question.listed("TABLES")
        for title, headings, lines in table.shown(rows)
    ]
    said = [text.say(rows) for text in question.listed("TEXTS") if text.section == question.name]
    return "\n\n".join([*blocks, *filter(None, said)])


def fill(path: Path, content: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a note.

    Raises:
        SystemExit: there is no such note, or it has no such place.
    """
    try:
        text = path.read_text()
    except OSError as error:
        refuse(f"{path}: there is no such note to fill: {error.strerror}")
    for name, inner in content.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            refuse(f"{path} has no place for {name!r}: add the lines '{begin}' and '{end}'")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{inner}\n{end}{rest.partition(end)[2]}"
    path.write_text(text)


def fill_from(results: Path | None, folder: Path, experiment: Experiment) -> Path:
    """Fill an experiment's note from a file of results, or else from the newest in a folder; returns the note.

    Raises:
        SystemExit: there are no results, or they are not of a commit (see :func:`check_source`), or no note.
    """
    path = results or newest(folder, experiment.name)
    result = read(path, experiment)
    check_source(result, path.name)
    note = NOTES / f"{experiment.note}.md"
    content = sections(result, experiment)
    content[f"machine{whose(experiment)}"] += "".join(beside(path, experiment))
    fill(note, content)
    return note


def beside(path: Path, experiment: Experiment) -> Iterator[str]:
    """A paragraph about each other file of committed results: a note speaks of them, though its tables do not."""
    if path.parent == ROOT / "experiments" / "results":
        for other in sorted(path.parent.glob(f"{experiment.name}-*.json")):
            if other != path:
                link = f"[{other.name}](../experiments/results/{other.name})"
                yield f"\n\n{link}: {machine_line(read(other, experiment), experiment)}"
