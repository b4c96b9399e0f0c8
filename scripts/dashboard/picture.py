"""Draws the panels of docs/grafana/partywall.json from the data of a running Prometheus: `picture.py DASHBOARD PROMETHEUS SECONDS OUT.svg`.

Each line is an answer of Prometheus to a query of the dashboard, over the last SECONDS. Grafana draws the same queries in its own way.
"""

import html
import json
import math
import sys
import time
import urllib.parse
import urllib.request

WIDTH, HEIGHT, LEFT, RIGHT, TOP, LEGEND = 620, 250, 70, 14, 34, 46
COLOURS = ["#2f7d32", "#c77c11", "#1f5fbf", "#a32a2a", "#6b3fa0", "#00838f", "#8d6e63", "#c2185b", "#546e7a", "#9e9d24", "#33691e", "#4e342e"]


def answers(prometheus, expression, start, end, step):
    """The series of a query: labels, and values by time."""
    expression = expression.replace("$__rate_interval", "10s")
    fields = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": str(step)}
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(fields)}", timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    for series in result:
        values = [(float(at), float(value)) for at, value in series["values"]]
        yield series["metric"], [(at, value) for at, value in values if math.isfinite(value)]


def number(value, unit):
    """A value with its unit, short."""
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
            if value >= scale or name == "us":
                return f"{value / scale:.3g} {name}"
    of_bytes = unit in ("Bps", "bytes")
    for scale, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            break
    else:
        scale, name = 1, ""
    suffix = {"Bps": "B/s", "bytes": "B"}.get(unit, "")
    return f"{value / scale:.3g} {name}{suffix}".strip() if of_bytes else f"{value / scale:.3g}{name}"


def legend(form, labels):
    """The name of a series, by the form that the dashboard gives."""
    for key, value in labels.items():
        form = form.replace("{{" + key + "}}", value)
    return form


def nice(largest):
    """The end of an axis, so that a quarter of it is a round number."""
    if largest <= 0:
        return 1.0
    scale = 10 ** math.floor(math.log10(largest))
    return next(step * scale for step in (1, 2, 4, 8, 10) if step * scale >= largest)


def panel(out, at, described, series, start, end):
    """Draws one panel with its series: names, and values by time."""
    x0, y0 = at
    unit = described["fieldConfig"]["defaults"].get("unit", "")
    left, right, top, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, y0 + TOP, y0 + HEIGHT - LEGEND
    out.append(f'<rect x="{x0 + 4}" y="{y0 + 4}" width="{WIDTH - 8}" height="{HEIGHT - 8}" class="panel"/>')
    out.append(f'<text x="{x0 + 14}" y="{y0 + 22}" class="title">{html.escape(described["title"])}</text>')
    drawn = [(name, values) for name, values in series if values]
    if not drawn:
        out.append(f'<text x="{(left + right) / 2}" y="{(top + bottom) / 2}" text-anchor="middle">no data in this run</text>')
        return
    most = nice(max(value for _, values in drawn for _, value in values))
    for quarter in range(5):
        y = bottom - (bottom - top) * quarter / 4
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{number(most * quarter / 4, unit)}</text>')
    for seconds in range(0, int(end - start) + 1, 20):
        x = left + (right - left) * seconds / (end - start)
        out.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{seconds} s</text>')
    for index, (_, values) in enumerate(drawn):
        colour = COLOURS[index % len(COLOURS)]
        pen, before, path = "M", None, []
        for moment, value in values:
            # A pause is no line.
            pen = "M" if before is None or moment - before > 2.5 else "L"
            x = left + (right - left) * (moment - start) / (end - start)
            path.append(f"{pen}{x:.1f},{bottom - (bottom - top) * value / most:.1f}")
            before = moment
        out.append(f'<path d="{" ".join(path)}" stroke="{colour}" class="line"/>')
    x, y, hidden = x0 + 14, y0 + HEIGHT - 24, 0
    # The largest of the many first: the rest has no room.
    for index, (name, _) in enumerate(drawn):
        width = 22 + 6.2 * len(name)
        if x + width > right and y < y0 + HEIGHT - 12:
            x, y = x0 + 14, y + 14
        if x + width > right - 60 and y > y0 + HEIGHT - 12:
            hidden = len(drawn) - index
            break
        out.append(f'<rect x="{x}" y="{y - 7}" width="9" height="4" fill="{COLOURS[index % len(COLOURS)]}"/>')
        out.append(f'<text x="{x + 13}" y="{y}">{html.escape(name)}</text>')
        x += width
    if hidden:
        out.append(f'<text x="{x}" y="{y}">and {hidden} more</text>')


def main():
    dashboard, prometheus, seconds, path = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
    with open(dashboard, encoding="utf-8") as file:
        panels = json.load(file)["panels"]
    end = time.time()
    start = end - seconds
    rows = (len(panels) + 1) // 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {rows * HEIGHT}" width="{2 * WIDTH}" height="{rows * HEIGHT}">',
        "<style>text{font:11px sans-serif;fill:#333}.title{font:bold 13px sans-serif}.panel{fill:#fff;stroke:#d0d4d9}"
        ".grid{stroke:#e6e8eb}.line{fill:none;stroke-width:1.6}</style>",
        '<rect width="100%" height="100%" fill="#f4f5f7"/>',
    ]
    empty = 0
    for index, described in enumerate(panels):
        series = []
        for target in described["targets"]:
            for labels, values in answers(prometheus, target["expr"], start, end, 1):
                series.append((legend(target.get("legendFormat", ""), labels), values))
        series.sort(key=lambda one: -max((value for _, value in one[1]), default=0))
        empty += not any(values for _, values in series)
        panel(out, (index % 2 * WIDTH, index // 2 * HEIGHT), described, series, start, end)
    out.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")
    print(f"wrote {path}: {len(panels)} panels, {empty} of them without data")


main()
