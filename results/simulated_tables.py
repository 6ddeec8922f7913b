"""Tables of the simulated questions, as Markdown: pure functions of a data file."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path

from results.simulated_data import Point, calibration_of, post_formula, read_points, speed_ups


def _table(title: str, note: str, points: list[Point], header: list[str], lines: list[list[str]]) -> str:
    out = [f"# {title}", "", f"{calibration_of(points)}. {note}", "", "| " + " | ".join(header) + " |"]
    out += ["|" + "---|" * len(header), *("| " + " | ".join(line) + " |" for line in lines)]
    return "\n".join(out) + "\n"


def _by_x(points: list[Point], title: str, note: str, axis: str) -> str:
    ratios = speed_ups(points)
    xs = sorted({x for line in ratios.values() for x, *_ in line})
    lines = []
    for series, values in ratios.items():
        found = {x: f"{ratio:.2f}" for x, ratio, *_ in values}
        lines.append([series.replace("|", ", "), *(found.get(x, "") for x in xs)])
    return _table(title, note, points, [axis, *(f"{x:g}" for x in xs)], lines)


def speed_up_against_ranks(path: Path) -> str:
    """Speed-up by model and W, and what bounds it."""
    points = read_points(path)
    note = "Layer time of MegaKernel over that of MegaKernel INC on a real switch, 4,096 tokens per rank, each at its best m_b."
    text = _by_x(points, "Speed-up of INC over plain all-to-all against W", note, "model, port of a rank")
    checks = [
        f"{series.replace('|', ', ')}, W = {x:g}: {ratio:.3f}"
        for series, line in speed_ups(points, mode="event").items()
        for x, ratio, *_ in line
    ]
    return text + "\nThe same in event mode: " + "; ".join(checks) + ".\n"


def speed_up_against_link(path: Path) -> str:
    """Speed-up by link speed, and where it begins."""
    points = read_points(path)
    note = "Layer time of MegaKernel over that of MegaKernel INC on a real switch, each at its best m_b; columns: GB/s of a port."
    text = _by_x(points, "Speed-up of INC over plain all-to-all against link speed", note, "GB/s")
    paying = []
    for series, line in speed_ups(points).items():
        fast = [x for x, ratio, *_ in line if ratio >= 1.1]
        paying.append(f"{series}: up to {max(fast):g} GB/s" if fast else f"{series}: nowhere")
    return text + "\nA gain of at least 10 %: " + "; ".join(paying) + ".\n"


def price_of_phases(path: Path) -> str:
    """Layer time by G, over the collective form."""
    points = read_points(path)
    free = {p.series: p for p in points if p.implementation == "megakernel_inc"}
    lines = []
    for p in points:
        if p.implementation == "megakernel_inc_phased":
            price = p.layer_time_us / free[p.series].layer_time_us
            memory = float(p.row["memory_mib"])
            size, times = f"{p.microbatch_tokens}", [f"{p.layer_time_us:.0f}", f"{price:.2f}"]
            lines.append([p.series, f"{p.x:g}", size, f"{memory:.1f}", *times])
    note = "Both at the best m_b of the collective form; rows that the larger of the two switches holds."
    header = ["", "G", "m_b", "switch rows, MiB", "layer us", "over collective"]
    return _table("Price of phases against G and against switch memory", note, points, header, lines)


def phases_under_skew(path: Path) -> str:
    """Layer time by routing and G, over the collective form."""
    points = read_points(path)
    free = {p.series: p for p in points if p.implementation == "megakernel_inc"}
    phased = [p for p in points if p.implementation == "megakernel_inc_phased"]
    groups = sorted({p.x for p in phased})
    lines = []
    for series, collective in free.items():
        for barrier, name in (("1", "barrier"), ("0", "no barrier")):
            own = {p.x: p for p in phased if (p.series, p.row["barrier"]) == (series, barrier)}
            prices = [f"{own[g].layer_time_us / collective.layer_time_us:.3f}" for g in groups]
            lines.append([series.replace("|", ", "), name, f"{collective.layer_time_us:,.0f}", *prices])
    memory = {p.x: float(p.row["memory_mib"]) for p in phased}
    held = "; ".join(f"G = {g:g}: {memory[g]:.0f}" for g in groups)
    collective_held = float(next(iter(free.values())).row["memory_mib"])
    note = "OLMoE, W = 8, 4,096 tokens per rank, m_b = 512, real switch, event mode; layer time over that of collective INC."
    header = ["routing, port", "phased dispatch ends with", "collective, us", *(f"G = {g:g}" for g in groups)]
    text = _table("Do phases help under skew?", note, points, header, lines)
    return text + f"\nMiB of rows that the larger switch holds: {held}; collective: {collective_held:.0f}.\n"


def best_microbatch(path: Path) -> str:
    """Best m_b by N beside the formula."""
    points = read_points(path)
    lines, notes = [], []
    for series in dict.fromkeys(p.series for p in points):
        own = [p for p in points if p.series == series]
        o, c, stages = post_formula(own)
        notes.append(f"{series}: o = {o:.1f} us, c = {1e3 * c:.0f} ns per token, S = {stages:.1f}")
        for tokens in sorted({p.x for p in own}):
            best = min((p for p in own if p.x == tokens), key=lambda p: p.layer_time_us)
            near = [p.microbatch_tokens for p in own if p.x == tokens and p.layer_time_us < 1.02 * best.layer_time_us]
            formula = sqrt(o * tokens / ((stages - 1) * c))
            found = [str(best.microbatch_tokens), f"{min(near)} to {max(near)}"]
            lines.append([series, f"{tokens:g}", *found, f"{formula:.0f}", f"{9 * sqrt(tokens):.0f}"])
    note = f"Formula: sqrt(o N / ((S - 1) c)), fitted to all points of the series. {'; '.join(notes)}."
    header = ["", "N", "best m_b", "within 2 %", "formula", "post: 9 sqrt(N)"]
    return _table("Best microbatch against N", note, points, header, lines)


def busiest_unit(path: Path) -> str:
    """The busiest unit by W and link speed."""
    points = read_points(path)
    ports = sorted({p.x for p in points})
    lines = []
    for series in dict.fromkeys(p.series for p in points):
        for ranks in sorted({int(p.row["num_ranks"]) for p in points}):
            own = [p for p in points if (p.series, p.row["num_ranks"]) == (series, str(ranks))]
            found = {p.x: f"{p.busiest} {100 * float(p.row['busy']):.0f} %" for p in own}
            lines.append([series, str(ranks), *(found.get(port, "") for port in ports)])
    note = "Unit with the largest busy share, 4,096 tokens per rank, m_b = 512; columns: GB/s of a rank's port."
    return _table("Where the busiest unit changes", note, points, ["", "W", *(f"{port:g}" for port in ports)], lines)


def two_level(path: Path) -> str:
    """Layer time by topology."""
    points = read_points(path)
    shares = sorted({p.x for p in points}, reverse=True)
    lines = []
    for series in dict.fromkeys(p.series for p in points):
        found = {p.x: f"{p.layer_time_us:.0f}" for p in points if p.series == series}
        lines.append([series, *(found.get(share, "") for share in shares)])
    note = "Layer time in us, DeepSeek-V3 on 64 ranks, leaves or nodes of 8; columns: uplink bandwidth per rank over its port's."
    return _table("Two-level against one-level", note, points, ["", *(f"{share:.3g}" for share in shares)], lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "speed_up_against_ranks": speed_up_against_ranks,
    "speed_up_against_link": speed_up_against_link,
    "price_of_phases": price_of_phases,
    "phases_under_skew": phases_under_skew,
    "best_microbatch": best_microbatch,
    "busiest_unit": busiest_unit,
    "two_level": two_level,
}
