"""The table of GLUE: the papers' rows, those of results/glue/, and where these come from."""

from pathlib import Path

from ea_tools.common import read_json
from ea_tools.tables.report import markdown_row, short_commit


def read_results(folder: Path) -> list[dict]:
    """What results/glue/ holds."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def markdown(table: dict, results: list[dict]) -> str:
    """The papers' rows and ours, and where ours come from."""
    tasks = table["tasks"]
    lines = [f"# {table['title']}", "", markdown_row(["Model", *tasks]), markdown_row(["---"] + ["---:"] * len(tasks))]
    for label, paper in table["paper"].items():
        scores = ("/".join(f"{score:.1f}" for score in paper[task]) for task in tasks)
        lines.append(markdown_row([f"{label} (journal)", *scores]))
    names = list(dict.fromkeys(result["name"] for result in results))
    names += [row["arch"] for row in table["paper"].values() if "arch" in row and row["arch"] not in names]
    for name in names:
        own = {result["task"]: result for result in results if result["name"] == name}
        lines.append(markdown_row([name, *(_cell(own.get(task)) for task in tasks)]))
    metrics = ", ".join(f"{task}: {'/'.join(content['metrics'])}" for task, content in tasks.items())
    lines += [
        "",
        f"(journal): the journal paper's table 5. {metrics}, all x 100; MNLI: matched/mismatched. Mean ± standard "
        'deviation over the seeds, where there are several. "not run": nobody has run it. The epoch and the setting '
        "were chosen on the same development set.",
        "",
        "## Where the numbers come from",
        "",
    ]
    for result in results:
        lines.append(
            f"- {result['name']}, {result['task']}: from {result['checkpoint'] or 'scratch'}; {result['device']}; "
            f"commit {_commits(result)}; {result['date']}; `{result['command']}`"
        )
    return "\n".join(lines if results else [*lines, "Nothing has been run yet."]) + "\n"


def _commits(result: dict) -> str:
    """At which commits its runs were trained; an older result names the one at which it was written alone."""
    return " and then ".join(map(short_commit, result.get("trained_at", [result["commit"]])))


def _cell(result: dict | None) -> str:
    if result is None:
        return "not run"
    scores = result["scores"].values()
    return (
        " / ".join(
            f"{score['mean']:.1f}" + ("" if score["deviation"] is None else f" ± {score['deviation']:.1f}")
            for score in scores
        )
        + f" ({result_seeds(result)})"
    )


def result_seeds(result: dict) -> str:
    """How many seeds a result has, in words."""
    seeds = next(iter(result["scores"].values()))["seeds"]
    return "1 seed" if seeds == 1 else f"{seeds} seeds"
