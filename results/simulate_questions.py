"""What would in-network computing give on real switches? Seven questions, each with a data file, a table and a figure.

    python -m results.simulate_questions                       all of them
    python -m results.simulate_questions --question two_level  one of them

Every number is simulated and names its calibration. Data: results/data/simulated_layer_QUESTION_COMMIT.csv; the table in
results/tables and the figure in results/figures have the same name and follow from the data alone. Fast mode, except for
the points that are marked as event mode.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from inc_runtime.cli import simulated_programs
from inc_runtime.config import Implementation
from inc_runtime.simulator.calibration import Calibration, load_calibration
from inc_runtime.simulator.event_mode import LayerResult, simulate_layer
from inc_runtime.simulator.fast_mode import simulate_fast
from inc_runtime.simulator.models import PUBLIC_MODELS
from inc_runtime.simulator.output import base_row, git_commit, write_rows
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind, TopologyKind
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec
from results.plot_simulated import FIGURES
from results.simulated_tables import TABLES

RESULTS = Path(__file__).parent
PLAIN, INC, PHASED = Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_INC, Implementation.MEGAKERNEL_INC_PHASED
MICROBATCHES = (128, 256, 512, 1024, 2048, 4096)
LINK_SPEEDS = (12.5, 25.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 450.0, 900.0)
TOKENS = 4096
Row = dict[str, object]


@dataclass(frozen=True)
class Study:
    """What a question runs on."""

    calibration: Calibration
    tick: Callable[[], object]

    def fast(self, scenario: Scenario) -> LayerResult:
        scenario.check()
        self.tick()
        return simulate_fast(LayerPlan(scenario, self.calibration))

    def event(self, scenario: Scenario) -> LayerResult:
        self.tick()
        return simulate_layer(LayerPlan(scenario, self.calibration), simulated_programs())

    def best(self, scenario: Scenario) -> LayerResult:
        """The result at the microbatch size with the smallest layer time: every implementation is shown at its best."""
        sizes = sorted({min(size, scenario.tokens_per_rank) for size in MICROBATCHES})
        return min((self.fast(replace(scenario, microbatch_tokens=m)) for m in sizes), key=lambda r: r.layer_time_us)


def row_of(result: LayerResult, series: str, x: float, **more: object) -> Row:
    """A layer time with the place it has in the figure."""
    value = {"metric": "layer_time", "value": round(result.layer_time_us, 3), "unit": "us"}
    return base_row(result) | value | {"series": series, "x": x, "busiest": result.busiest} | more


def home(scenario: Scenario, **network: object) -> Scenario:
    """Rows of a rank's own experts stay at home, for the plain forms and for INC alike: the fair comparison."""
    return scenario.with_network(local_bypass=True, **network)


def speed_up_against_ranks(study: Study) -> Iterator[Row]:
    """INC over plain all-to-all against W, for four models, on NVLink-class and on 400 Gbit/s ports."""
    for name, model in PUBLIC_MODELS.items():
        for port in (None, 50.0):
            for ranks in (2, 4, 8, 16, 32, 64, 128, 256):
                if ranks > model.shape.num_experts or (name == "kimi_k2" and ranks > 128):
                    continue
                for implementation in (PLAIN, INC):
                    base = Scenario(name, model.shape, num_ranks=ranks, implementation=implementation, tokens_per_rank=TOKENS)
                    result = study.best(home(base, port_gbps=port))
                    series = f"{name}|{'nvlink' if port is None else '50 GB/s'}"
                    yield row_of(result, series, ranks)
                    if name == "olmoe_1b_7b" and ranks in (4, 8):
                        yield row_of(study.event(result.plan.scenario), series, ranks)


def speed_up_against_link(study: Study) -> Iterator[Row]:
    """INC over plain all-to-all against the bandwidth of a rank's port."""
    for name, ranks in (("olmoe_1b_7b", 4), ("olmoe_1b_7b", 16), ("olmoe_1b_7b", 64), ("deepseek_v3", 64)):
        for port in LINK_SPEEDS:
            for implementation in (PLAIN, INC):
                shape = PUBLIC_MODELS[name].shape
                base = Scenario(name, shape, num_ranks=ranks, implementation=implementation, tokens_per_rank=TOKENS)
                yield row_of(study.best(home(base, port_gbps=port)), f"{name}, W = {ranks}", port)


def price_of_phases(study: Study) -> Iterator[Row]:
    """Phased over collective INC against G and against the rows that the switch holds, both at the same microbatch size."""
    for ranks in (4, 8, 16, 32):
        base = Scenario("olmoe_1b_7b", num_ranks=ranks, implementation=INC, tokens_per_rank=TOKENS)
        free = study.best(base)
        yield row_of(free, f"W = {ranks}", ranks, memory_mib=free.plan.scenario.switch_row_bytes() / 2**20)
        groups = [2**i for i in range(ranks.bit_length())]
        for group in groups:
            scenario = replace(free.plan.scenario, implementation=PHASED, ranks_per_phase=group)
            result = study.fast(scenario)
            yield row_of(result, f"W = {ranks}", group, memory_mib=scenario.switch_row_bytes() / 2**20)


def phases_under_skew(study: Study) -> Iterator[Row]:
    """Phased over collective INC under skewed routing, on NVLink-class and on 400 Gbit/s ports, with the barrier and without."""
    for kind in (RoutingKind.UNIFORM, RoutingKind.ZIPF, RoutingKind.HOT_RANK):
        for port in (None, 50.0):
            base = Scenario("olmoe_1b_7b", num_ranks=8, implementation=INC, tokens_per_rank=TOKENS, microbatch_tokens=512)
            base = replace(base, routing=RoutingSpec(kind)).with_network(port_gbps=port)
            series = f"{kind.value}|{'nvlink' if port is None else '50 GB/s'}"
            yield row_of(study.event(base), series, 8, memory_mib=base.switch_row_bytes() / 2**20)
            for group in (1, 2, 4, 8):
                for barrier in (True, False):
                    phased = replace(base, implementation=PHASED, ranks_per_phase=group, barrier_after_dispatch=barrier)
                    more = {"memory_mib": phased.switch_row_bytes() / 2**20, "barrier": int(barrier)}
                    yield row_of(study.event(phased), series, group, **more)


def best_microbatch(study: Study) -> Iterator[Row]:
    """Layer time against m_b for each N: the best m_b, beside the formula of the post."""
    kinds = (
        ("MegaKernel", PLAIN, NetworkSpec()),
        ("MegaKernel INC, real switch", INC, NetworkSpec()),
        (
            "MegaKernel INC, emulated, two planes",
            INC,
            NetworkSpec(SwitchKind.EMULATED, Forwarding.STORE_AND_FORWARD, planes=2, dual_role=True),
        ),
    )
    for series, implementation, network in kinds:
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
            for size in (64, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096, 8192):
                if size <= tokens and tokens / size <= 128:
                    scenario = Scenario(
                        series, tokens_per_rank=tokens, microbatch_tokens=size, implementation=implementation, network=network
                    )
                    yield row_of(study.fast(scenario), series, tokens)


def busiest_unit(study: Study) -> Iterator[Row]:
    """Which unit is busiest, over W and link speed, for plain and INC on real switches, and for INC on emulated ones."""
    emulated = NetworkSpec(SwitchKind.EMULATED, Forwarding.STORE_AND_FORWARD, planes=2, dual_role=True)
    for series, implementation, network in (
        ("MegaKernel, real switch", PLAIN, NetworkSpec()),
        ("MegaKernel INC, real switch", INC, NetworkSpec()),
        ("MegaKernel INC, two emulated switches", INC, emulated),
    ):
        for ranks in (2, 4, 8, 16, 32, 64):
            for port in LINK_SPEEDS:
                spec = replace(network, port_gbps=port)
                base = Scenario("olmoe_1b_7b", num_ranks=ranks, implementation=implementation, network=spec)
                result = study.fast(replace(base, tokens_per_rank=TOKENS, microbatch_tokens=512))
                yield row_of(result, series, port, busy=round(result.busy[result.busiest], 4))


def two_level(study: Study) -> Iterator[Row]:
    """One level against two, against the uplinks of a leaf of 8 ranks: DeepSeek-V3 on 64 ranks; and nodes of 8 with rails."""
    shape, size, ranks = PUBLIC_MODELS["deepseek_v3"].shape, 8, 64
    port = study.calibration.port_gbps
    for implementation in (PLAIN, INC):
        name = "MegaKernel INC" if implementation is INC else "MegaKernel"
        base = Scenario("deepseek_v3", shape, num_ranks=ranks, implementation=implementation, tokens_per_rank=TOKENS)
        flat = study.best(base)
        for share in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125):
            yield row_of(flat, f"{name}, one level", share)
            spine = base.with_network(
                topology=TopologyKind.LEAF_SPINE, ranks_per_leaf=size, uplink_gbps=share * size * port, uplink_latency_us=0.6
            )
            yield row_of(study.best(spine), f"{name}, leaf and spine", share)
        rails = base.with_network(topology=TopologyKind.RAILS, ranks_per_leaf=size, uplink_gbps=50.0, uplink_latency_us=2.5)
        yield row_of(study.best(rails), f"{name}, rails of 50 GB/s", 50.0 / port)


QUESTIONS: dict[str, Callable[[Study], Iterator[Row]]] = {
    "speed_up_against_ranks": speed_up_against_ranks,
    "speed_up_against_link": speed_up_against_link,
    "price_of_phases": price_of_phases,
    "phases_under_skew": phases_under_skew,
    "best_microbatch": best_microbatch,
    "busiest_unit": busiest_unit,
    "two_level": two_level,
}
MORE_COLUMNS = ("question", "series", "x", "busiest", "busy", "memory_mib", "barrier")


def answer(question: str, calibration: Calibration, output: Path) -> Path:
    """Run one question: data, table and figure, in folders of `output`. Returns the data file."""
    with tqdm(desc=question, delay=3, unit=" layers", file=sys.stderr) as bar:
        rows = [row | {"question": question} for row in QUESTIONS[question](Study(calibration, bar.update))]
    for folder in ("data", "tables", "figures"):
        for old in (output / folder).glob(f"simulated_layer_{question}_*"):
            old.unlink()
    data = output / "data" / f"simulated_layer_{question}_{git_commit(RESULTS)}.csv"
    write_rows(data, rows, f"python -m results.simulate_questions --question {question}", MORE_COLUMNS)
    redraw(question, data, output)
    return data


def redraw(question: str, data: Path, output: Path) -> None:
    """Table and figure of a data file, in folders of `output`."""
    for folder in ("tables", "figures"):
        (output / folder).mkdir(exist_ok=True)
    (output / "tables" / f"{data.stem}.md").write_text(TABLES[question](data), encoding="utf-8")
    FIGURES[question](data, output / "figures" / f"{data.stem}.png")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", choices=list(QUESTIONS), help="default: all")
    parser.add_argument("--calibration", type=Path, help="default: the committed one")
    parser.add_argument("--redraw", action="store_true", help="tables and figures from the data files that are there")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of data, tables and figures (default: this one)")
    options = parser.parse_args()
    for question in [options.question] if options.question else list(QUESTIONS):
        if options.redraw:
            redraw(question, next((options.output / "data").glob(f"simulated_layer_{question}_*.csv")), options.output)
        else:
            print(answer(question, load_calibration(options.calibration), options.output))
    return 0


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    sys.exit(main())
