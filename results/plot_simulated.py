"""Figures of the simulated questions: pure functions of a data file. Simulated series are hatched or dashed, never solid."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from results.simulated_data import Point, calibration_of, post_formula, read_points, speed_ups

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#c98a1b", "#6a4c93", "#444444")
UNIT_COLORS = {
    "matrix units": "#b9a3d6",
    "vector units": "#a9d8a0",
    "rank port out": "#f2b880",
    "rank port in": "#e58a5b",
    "switch port in": "#8fb8de",
    "switch port out": "#4f8fc0",
}
NAMES = {"olmoe_1b_7b": "OLMoE", "qwen3_235b_a22b": "Qwen3-235B", "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi-K2"}


def _named(series: str) -> str:
    for name, label in NAMES.items():
        series = series.replace(name, label)
    return series


def _finish(figure: Any, title: str, points: list[Point], target: Path) -> None:
    figure.suptitle(title, fontsize=12)
    figure.text(0.5, 0.005, calibration_of(points) + ". Dashed or hatched: simulated.", ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(target, dpi=140)
    plt.close(figure)


def _log_axis(axis: Any, values: list[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{v:g}" for v in values])
    axis.minorticks_off()
    axis.grid(alpha=0.25)


def speed_up_against_ranks(path: Path, target: Path) -> None:
    """Two panels by port, a line per model, event-mode points as crosses."""
    points = read_points(path)
    ratios, checks = speed_ups(points), speed_ups(points, mode="event")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    titles = {"nvlink": "port of the calibration (NVLink class)", "50 GB/s": "50 GB/s ports (400 Gbit/s)"}
    for axis, (port, title) in zip(axes, titles.items(), strict=True):
        for color, (name, label) in zip(COLORS, NAMES.items(), strict=False):
            line = ratios.get(f"{name}|{port}", [])
            axis.plot([x for x, *_ in line], [y for _, y, *_ in line], "--o", ms=4, color=color, label=label)
            check = checks.get(f"{name}|{port}", [])
            axis.plot([x for x, *_ in check], [y for _, y, *_ in check], "x", ms=9, mew=2, color="black")
        axis.plot([], [], "x", ms=9, mew=2, color="black", label="event mode")
        axis.axhline(1, color="black", lw=0.7)
        _log_axis(axis, [2.0**i for i in range(1, 9)])
        axis.set(title=title, xlabel="compute ranks W")
    axes[0].set_ylabel("layer time, plain all-to-all over INC")
    axes[0].legend(fontsize=8)
    _finish(figure, "Speed-up of INC (real switch) over plain all-to-all, 4,096 tokens per rank", points, target)


def speed_up_against_link(path: Path, target: Path) -> None:
    """A line per model and W, the 10 % line marked."""
    points = read_points(path)
    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    for color, (series, line) in zip(COLORS, speed_ups(points).items(), strict=False):
        axis.plot([x for x, *_ in line], [y for _, y, *_ in line], "--o", ms=4, color=color, label=_named(series))
    axis.axhline(1.1, color="#999999", lw=0.8, ls=":")
    axis.text(12.5, 1.115, "INC pays 10 %", fontsize=8, color="#777777")
    axis.axhline(1, color="black", lw=0.7)
    _log_axis(axis, sorted({p.x for p in points}))
    axis.set(xlabel="GB/s of a rank's port, each direction", ylabel="layer time, plain all-to-all over INC")
    axis.legend(fontsize=8)
    _finish(figure, "Where INC starts to pay: speed-up against link speed, 4,096 tokens per rank", points, target)


def price_of_phases(path: Path, target: Path) -> None:
    """Price against G, and against what the switch holds."""
    points = read_points(path)
    free = {p.series: p for p in points if p.implementation == "megakernel_inc"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    for color, series in zip(COLORS, free, strict=False):
        own = [p for p in points if p.series == series and p.implementation == "megakernel_inc_phased"]
        price = [p.layer_time_us / free[series].layer_time_us for p in own]
        axes[0].plot([p.x for p in own], price, "--o", ms=4, color=color, label=series)
        axes[1].plot([float(p.row["memory_mib"]) for p in own], price, "--o", ms=4, color=color)
        axes[1].plot(float(free[series].row["memory_mib"]), 1, "s", ms=7, mfc="none", mec=color)
    axes[1].plot([], [], "s", mfc="none", mec="black", label="collective form")
    for axis in axes:
        axis.axhline(1, color="black", lw=0.7)
        axis.set_yscale("log", base=2)
        axis.set_yticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"])
    _log_axis(axes[0], sorted({p.x for p in points}))
    _log_axis(axes[1], [2.0**i for i in range(1, 11, 1)])
    axes[0].set(xlabel="ranks per phase G", ylabel="layer time, phased over collective INC")
    axes[1].set(xlabel="MiB of rows that a switch holds")
    axes[0].legend(fontsize=8)
    axes[1].legend(fontsize=8)
    _finish(figure, "Price of phases, OLMoE, 4,096 tokens per rank, real switch, cut-through", points, target)


def phases_under_skew(path: Path, target: Path) -> None:
    """Price against G, a line per routing, a panel per port; without the barrier in paler lines."""
    points = read_points(path)
    free = {p.series: p for p in points if p.implementation == "megakernel_inc"}
    ports = list(dict.fromkeys(series.split("|")[1] for series in free))
    figure, axes = plt.subplots(1, len(ports), figsize=(10, 4.4), sharey=True)
    for axis, port in zip(axes, ports, strict=True):
        for color, series in zip(COLORS, [s for s in free if s.endswith(port)], strict=False):
            for barrier, alpha in (("1", 1.0), ("0", 0.4)):
                own = [p for p in points if p.series == series and p.row["barrier"] == barrier]
                price = [p.layer_time_us / free[series].layer_time_us for p in own]
                label = series.split("|")[0].replace("_", " ") + (", no barrier" if barrier == "0" else "")
                axis.plot([p.x for p in own], price, "--o", ms=4, color=color, alpha=alpha, label=label)
        axis.axhline(1, color="black", lw=0.7)
        axis.set(title=f"port of a rank: {port}", xlabel="ranks per phase G")
        _log_axis(axis, sorted({p.x for p in points}))
    axes[0].set_ylabel("layer time, phased over collective INC")
    axes[0].legend(fontsize=8)
    _finish(figure, "Phases under skew, OLMoE, W = 8, 4,096 tokens per rank, real switch, event mode", points, target)


def best_microbatch(path: Path, target: Path) -> None:
    """Best m_b with its 2 % range, the fitted formula and the post's rule."""
    points = read_points(path)
    names = list(dict.fromkeys(p.series for p in points))
    figure, axes = plt.subplots(1, len(names), figsize=(12, 4.3), sharey=True)
    for axis, series, color in zip(axes, names, COLORS, strict=False):
        own = [p for p in points if p.series == series]
        o, c, stages = post_formula(own)
        tokens = sorted({p.x for p in own})
        for n in tokens:
            best = min((p for p in own if p.x == n), key=lambda p: p.layer_time_us)
            near = [p.microbatch_tokens for p in own if p.x == n and p.layer_time_us < 1.02 * best.layer_time_us]
            axis.plot([n, n], [min(near), max(near)], color=color, lw=7, alpha=0.25, solid_capstyle="round")
            axis.plot(n, best.microbatch_tokens, "o", color=color)
        axis.plot(tokens, [sqrt(o * n / ((stages - 1) * c)) for n in tokens], "--", color=color, label="formula, fitted o, c, S")
        axis.plot(tokens, [9 * sqrt(n) for n in tokens], ":", color="#777777", label="post: 9 sqrt(N)")
        axis.plot([], [], "o", color=color, label="best; bar: within 2 %")
        axis.set_yscale("log", base=2)
        axis.set_yticks([2.0**i for i in range(6, 14)], [str(2**i) for i in range(6, 14)])
        _log_axis(axis, tokens)
        axis.set_xticks(tokens, [f"{n / 1024:g}k" for n in tokens])
        axis.set(title=f"{series}\no = {o:.1f} us, c = {1e3 * c:.0f} ns, S = {stages:.1f}", xlabel="tokens per rank N")
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("microbatch m_b, tokens")
    axes[0].legend(fontsize=8)
    _finish(figure, "Best microbatch against N, OLMoE, W = 4", points, target)


def busiest_unit(path: Path, target: Path) -> None:
    """A map per implementation: W against link speed, coloured by the busiest unit, its busy share written in."""
    points = read_points(path)
    names = list(dict.fromkeys(p.series for p in points))
    ports, ranks = sorted({p.x for p in points}), sorted({int(p.row["num_ranks"]) for p in points})
    figure, axes = plt.subplots(1, len(names), figsize=(14, 4.2), sharey=True)
    for axis, series in zip(axes, names, strict=True):
        for p in points:
            if p.series == series:
                x, y = ports.index(p.x), ranks.index(int(p.row["num_ranks"]))
                axis.add_patch(plt.Rectangle((x, y), 1, 1, fc=UNIT_COLORS[p.busiest], ec="white", hatch="//", lw=0.5, alpha=0.9))
                share = 100 * float(p.row["busy"])
                axis.text(x + 0.5, y + 0.5, f"{share:.0f}", ha="center", va="center", fontsize=8)
        axis.set(xlim=(0, len(ports)), ylim=(0, len(ranks)), title=series, xlabel="GB/s of a rank's port")
        axis.set_xticks(np.arange(len(ports)) + 0.5, [f"{port:g}" for port in ports], fontsize=8)
        axis.set_yticks(np.arange(len(ranks)) + 0.5, [str(r) for r in ranks])
    axes[0].set_ylabel("compute ranks W")
    used = [unit for unit in UNIT_COLORS if any(p.busiest == unit for p in points)]
    handles = [plt.Rectangle((0, 0), 1, 1, fc=UNIT_COLORS[unit], hatch="//", ec="white") for unit in used]
    figure.legend(handles, used, loc="upper center", ncol=len(used), fontsize=9, bbox_to_anchor=(0.5, 0.93), frameon=False)
    for axis in axes:
        axis.title.set_position((0.5, 1.0))
        axis.title.set_fontsize(10)
    figure.subplots_adjust(top=0.8)
    figure.suptitle("The busiest unit (number: its busy share in %), OLMoE, 4,096 tokens per rank, m_b = 512", fontsize=12)
    figure.text(0.5, 0.005, calibration_of(points) + ". Hatched: simulated.", ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.88))
    figure.savefig(target, dpi=140)
    plt.close(figure)


def two_level(path: Path, target: Path) -> None:
    """Layer time against the bandwidth of the uplinks."""
    points = read_points(path)
    figure, axis = plt.subplots(figsize=(8, 4.8))
    marks = {"one level": ":", "leaf and spine": "--o"}
    for series in dict.fromkeys(p.series for p in points):
        own = [p for p in points if p.series == series]
        color = COLORS[0] if "INC" in series else COLORS[1]
        if "rails" in series:
            axis.plot([p.x for p in own], [p.layer_time_us / 1e3 for p in own], "D", ms=8, mfc="none", mec=color, label=series)
            continue
        style = next(mark for name, mark in marks.items() if name in series)
        axis.plot([p.x for p in own], [p.layer_time_us / 1e3 for p in own], style, ms=4, color=color, label=series)
    shares = sorted({p.x for p in points if "rails" not in p.series})
    _log_axis(axis, shares)
    axis.set_xticks(shares, [f"1/{1 / share:g}" if share < 1 else "1" for share in shares])
    axis.set_yscale("log", base=2)
    axis.set(xlabel="uplink bandwidth per rank, over that of its port", ylabel="layer time, ms")
    low, high = axis.get_ylim()
    ticks = [2.0**i for i in range(int(np.floor(np.log2(low))), int(np.ceil(np.log2(high))) + 1)]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.legend(fontsize=8)
    _finish(figure, "Two levels against one: DeepSeek-V3, 64 ranks in leaves of 8, 4,096 tokens per rank", points, target)


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "speed_up_against_ranks": speed_up_against_ranks,
    "speed_up_against_link": speed_up_against_link,
    "price_of_phases": price_of_phases,
    "phases_under_skew": phases_under_skew,
    "best_microbatch": best_microbatch,
    "busiest_unit": busiest_unit,
    "two_level": two_level,
}
