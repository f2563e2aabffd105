"""Draws start.svg: likeness and bound of every stage by step, of paper mode, reference mode and the released objective.

    python figure.py                                  # needs nothing but Python
    python figure.py runs/paper runs/reference        # takes paper.csv and reference.csv from two runs of mcl-train first

released.csv is what released.py writes. A run needs save.metrics_every=1: the row of its step n is of the batch before update n.
"""

import csv
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
RUNS = [("paper", "paper mode", "#0072b2"), ("reference", "reference mode", "#d55e00"), ("released", "plain PyTorch script", "#009e73")]
WIDTH, HEIGHT, LEFT, TOP, SIDE = 760, 340, 56, 44, 300


def take(name, folder):
    """Likeness and bound of every 25th step of a run, as released.py writes them."""
    with open(os.path.join(folder, "metrics-steps.jsonl")) as file:
        rows = [row for row in map(json.loads, file) if (row["step"] - 1) % 25 == 0]
    if [row["step"] for row in rows[:2]] != [1, 26]:
        sys.exit(f"{folder}: no rows of steps 1 and 26; train with --set save.metrics_every=1")
    of_stages = [c for c in rows[0] if (c.startswith("likeness.") and c.count(".") == 2) or (c.startswith("mutual_information.") and c.count(".") == 4)]
    with open(os.path.join(HERE, name + ".csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "loss"] + of_stages)
        for row in rows:
            writer.writerow([row["step"] - 1] + [f"{row[c]:.6f}" for c in ["loss"] + of_stages])


def read(name):
    with open(os.path.join(HERE, name + ".csv"), newline="") as file:
        return list(csv.DictReader(file))


def panel(rows_by_run, x0, title, prefix, dots, low, high, ticks):
    last = max(float(row["step"]) for rows in rows_by_run.values() for row in rows)
    px = lambda x: x0 + x / last * SIDE
    py = lambda y: TOP + 220 - (y - low) / (high - low) * 220
    out = [f'<text x="{x0}" y="{TOP - 12}" font-size="13">{title}</text>']
    for tick in ticks:
        out.append(f'<line x1="{x0}" x2="{x0 + SIDE}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" stroke="#ccc"/>')
        out.append(f'<text x="{x0 - 6}" y="{py(tick) + 4:.1f}" font-size="11" text-anchor="end">{tick:g}</text>')
    for step in range(0, int(last) + 1, 50):
        out.append(f'<text x="{px(step):.1f}" y="{TOP + 238}" font-size="11" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{x0 + SIDE / 2:.0f}" y="{TOP + 254}" font-size="11" text-anchor="middle">step</text>')
    for name, _, colour in RUNS:
        rows = rows_by_run[name]
        columns = [c for c in rows[0] if c.startswith(prefix) and c.count(".") == dots]
        assert all(low <= float(r[c]) <= high for r in rows for c in columns), f"{name}: {prefix} leaves {low} to {high}; widen the axis"
        for column in columns:
            points = " ".join(f"{px(float(r['step'])):.1f},{py(float(r[column])):.1f}" for r in rows)
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3" stroke-opacity="0.75"/>')
    return out


def main():
    for name, folder in zip(("paper", "reference"), sys.argv[1:]):
        take(name, folder)
    rows = {name: read(name) for name, *_ in RUNS}
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>')
    out += panel(rows, LEFT, "likeness: mean cosine of two images", "likeness.", 2, 0.9, 1.0, [0.9, 0.92, 0.94, 0.96, 0.98, 1.0])
    out += panel(rows, LEFT + SIDE + 70, "bound: ln 126 - ICL, all pairs of stages", "mutual_information.", 4, -0.2, 0.4, [-0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.4])
    for i, (_, label, colour) in enumerate(RUNS):
        x = LEFT + i * 200
        out.append(f'<line x1="{x}" x2="{x + 24}" y1="{HEIGHT - 22}" y2="{HEIGHT - 22}" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{x + 30}" y="{HEIGHT - 18}" font-size="12">{label}</text>')
    with open(os.path.join(HERE, "start.svg"), "w") as file:
        file.write("\n".join(out + ["</svg>"]) + "\n")


if __name__ == "__main__":
    main()
