"""Write the README's result table and picture from the store: `make readme`.

The README is read where no notebook runs, so its numbers are copied; this copies them,
and tests/test_readme.py fails when the copy is not what the store says.
"""
from pathlib import Path

from stabbook import metrics, paper, plots, store

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def interval(h):
    "Such as 0.034 (0.028 to 0.041), or a bound where the grid ends."
    if h.kind == "above_grid": return f"above {h.grid[-1]:g}"
    if h.kind == "below_grid": return f"below {h.grid[0]:g}"
    return f"{h.estimate:.2g} ({h.low:.2g} to {h.high:.2g})"


def results():
    "The block of the README, as Markdown"
    runs = store.load("learning_rate")
    halves = metrics.lr50_seeds(runs, floors=store.load("floors", runs.attrs["scale"]))
    theirs, rows = paper.HIGHEST_LR, []
    for name, h in sorted(halves.items(), key=lambda p: (p[1].estimate, p[0])):
        loss = metrics.best_cell(
            *runs[runs.method == name][["learning_rate", "final_loss"]].to_numpy().T
        )
        rows.append(f"| `{name}` | {interval(h)} | {loss[1]:.2f} | {loss[0]:g} "
                    f"| {theirs[name] / theirs['baseline']:.1f}× |")
    rates, seeds = runs.learning_rate.nunique(), runs.seed.nunique()
    head = (
        f"{len(runs)} runs at scale `{runs.attrs['scale']}`: {len(halves)} methods, "
        f"{rates} learning rates from {runs.learning_rate.min():g} to "
        f"{runs.learning_rate.max():g}, {seeds} seeds.\n"
        "LR50 is the learning rate at which half of the runs fail, with its 95 % "
        "interval; a run has failed when it ends above the "
        f"{runs.common_line.iloc[0]:.2f} nats that the same model reaches without "
        "attention.\nThe loss is the median at the method's best rate, in nats per "
        "byte.\n\n| method | LR50 | loss at its best rate | best rate | highest stable "
        "rate in the paper, over its baseline's |\n|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows)


def fill(text):
    "The README with its block written anew"
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{results()}\n{END}{rest.partition(END)[2]}"


def picture(path):
    "The opening figure, as on the book's first page"
    runs = store.load("attention_logits")
    largest = store.curves(
        "attention_logits", runs.attrs["scale"], "max_attention_logit"
    )
    ax = plots.curves_band(largest, "max_attention_logit", runs=runs, log_y=True)
    ax.figure.savefig(path, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text()))
    picture(ROOT / "book" / "_static" / "exploding_logits.png")
    print("README.md and book/_static/exploding_logits.png are written from the store")
