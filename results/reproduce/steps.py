"""The steps of the evaluation as data: what each runs, what it needs of a machine, and what it leaves.

A step's commands run in the root of the repository. In them `{python}` is this Python, `{commit}` the commit, `{folder}` an empty
folder: whatever a command leaves there goes into data/ (.csv), tables/ (.md) or figures/ (.png) of the results. `{data}` is a
word that becomes the measured data files. Whether a machine can run a step is the doctor's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inc_runtime.config import CommunicationModel
from inc_runtime.doctor import Report, Status
from inc_runtime.placement import PlacementKind

PYTHON, COMMIT, FOLDER, DATA = "{python}", "{commit}", "{folder}", "{data}"
TORCHRUN = f"{PYTHON} -m torch.distributed.run"
SIX_PES = f"{PYTHON} -m inc_runtime.mps -- {TORCHRUN} --nproc-per-node 6"
"""Four ranks and two switches that share GPUs, under an MPS daemon of their own."""

DEVICE_FINDINGS = ("GPUs", "torch", "NVSHMEM", "kernel loader", "nvcc", "MPS")


class Need(Enum):
    """What a step asks of the machine: a placement of four ranks and two switches, or GPUs for kernels without switches."""

    NOTHING = "nothing"
    MEASURED_DATA = "measured data"
    HOST = PlacementKind.HOST.value
    ONE_GPU = PlacementKind.ONE_GPU.value
    SCALE_MODEL = PlacementKind.SCALE_MODEL.value
    GPU = "a GPU and nvcc"
    TWO_GPUS = "two GPUs and nvcc"
    FOUR_GPUS = "four GPUs and nvcc"
    NATIVE = PlacementKind.NATIVE.value


DECIDED_BY = {
    Need.HOST: ("memory", "model packages"),
    Need.GPU: ("GPUs", "torch", "kernel loader", "nvcc"),
    Need.TWO_GPUS: ("GPUs", "NVLink", "torch", "kernel loader", "nvcc"),
    Need.FOUR_GPUS: ("GPUs", "NVLink", "torch", "kernel loader", "nvcc"),
}
"""Findings of the doctor that decide a need, beside its plan for the placement of that name."""

MENDED_BY = {
    Need.HOST: ("processor", "memory", "shared memory", "torch", "gloo", "model packages"),
    Need.ONE_GPU: DEVICE_FINDINGS,
    Need.SCALE_MODEL: DEVICE_FINDINGS,
    Need.NATIVE: DEVICE_FINDINGS,
    **{need: DECIDED_BY[need] for need in (Need.GPU, Need.TWO_GPUS, Need.FOUR_GPUS)},
}
"""Findings that say what to do where a need is not met."""


@dataclass(frozen=True)
class Missing:
    """Why a step cannot run, and what to do about it."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Step:
    """One resumable part. `seconds` is a rough estimate; `writes` are files that must be there at the end, by their final name.

    `replaces`: files of earlier commits that the new ones make worthless, as patterns of names. `goes_on`: an interrupted command
    continues from what it has left in its folder.
    """

    name: str
    shows: str
    need: Need
    seconds: float
    commands: tuple[str, ...]
    writes: tuple[str, ...]
    replaces: tuple[str, ...] = ()
    goes_on: bool = False


def missing(need: Need, report: Report, has_data: bool) -> Missing | None:
    """What stands between this machine and a step, or None. `has_data`: measured data files are there."""
    if need is Need.MEASURED_DATA and not has_data:
        return Missing("There are no measured data files.", "Run the steps that measure on GPUs first.")
    plan = next((plan for plan in report.placements if plan.placement == need.value), None)
    lacking = [finding for finding in report.findings if finding.status is not Status.OK]
    reasons = list(plan.reasons) if plan else []
    for finding in lacking:
        slow_link = finding.name == "NVLink" and finding.status is Status.LIMITED
        if finding.name in DECIDED_BY.get(need, ()) and not slow_link:
            reasons.append(f"{finding.name}: {finding.seen}. {finding.meaning}")
    if need is Need.FOUR_GPUS and report.num_gpus < 4:
        reasons.append(f"GPUs: {report.num_gpus} of 4.")
    if not reasons:
        return None
    if no_gpu := [reason for reason in reasons if reason.startswith("GPUs: ")]:
        reasons = no_gpu  # what else is missing matters only where there are some
    remedies = [finding.remedy for finding in lacking if finding.name in MENDED_BY.get(need, ()) and finding.remedy]
    return Missing(" ".join(reasons), " ".join(remedies))


def _simulated(question: str, seconds: float) -> Step:
    return Step(
        f"simulated_{question}",
        f"what real switches would give: {question.replace('_', ' ')}",
        Need.NOTHING,
        seconds,
        (f"{PYTHON} -m results.simulate_questions --question {question} --output {FOLDER}",),
        (f"simulated_layer_{question}_{COMMIT}.csv", f"simulated_layer_{question}_{COMMIT}.png"),
        (f"simulated_layer_{question}_*",),
    )


def _speed_ups(need: Need, part: str, port_gbps: float) -> Step:
    """The five implementations side by side. `port_gbps`: a bound of each rank's port; 0 for none."""
    file = f"speed_ups_{need.value}_{COMMIT}{part}.csv"
    measure = f"{SIX_PES} -m results.measure_speed_ups --placement {need.value} --rank-port-gbps {port_gbps:g} {CUTS}"
    return Step(
        f"speed_ups_{need.value}{part}",
        f"time of the MoE layer in prefill, five implementations{f', ports of {port_gbps:g} GB/s' if port_gbps else ''}",
        need,
        900,
        (f"{measure} --commit {COMMIT} --output {FOLDER}/{file}",),
        (file, file.replace(".csv", ".md"), file.replace(".csv", ".png")),
        goes_on=True,
    )


def _timeline(model: CommunicationModel) -> Step:
    file = f"stage_timeline_scale_model_{COMMIT}_{model.value}.csv"
    program = f"{SIX_PES} -m tests.gpu.megakernel_program trace --placement scale_model --model {model.value}"
    return Step(
        f"timeline_{model.value}",
        f"which stage of one launch ran when, {model.value}",
        Need.SCALE_MODEL,
        40,
        (
            f"{program} --tokens 8192:1024:4 --output {FOLDER}/{file}",
            f"{PYTHON} results/plot_stage_timeline.py {FOLDER}/{file} --output {FOLDER}",
        ),
        (file, file.replace(".csv", ".png")),
    )


def _collectives(need: Need, options: str, seconds: float) -> Step:
    file = f"collectives_{need.value}_{COMMIT}.csv"
    measure = f"{SIX_PES} results/measure_collectives.py --placement {need.value} {options}"
    return Step(
        f"collectives_{need.value}",
        "throughput and latency of dispatch and combine",
        need,
        seconds,
        (f"{measure} --commit {COMMIT} --output {FOLDER}/{file}",),
        (file,),
    )


def _native_layer(part: str, options: str, seconds: float, need: Need = Need.TWO_GPUS) -> Step:
    """The Baseline with one rank per GPU, and what is plugged in beside it, in one run; every process has a GPU."""
    file = f"moe_layer_native_{COMMIT}{f'_{part}' if part else ''}.csv"
    processes = 4 if need is Need.FOUR_GPUS else 2
    measure = f"{TORCHRUN} --nproc-per-node {processes} -m results.measure_moe_layer --commit {COMMIT}"
    return Step(
        f"layer_native{f'_{part}' if part else ''}",
        f"the layer with a rank per GPU: Baseline, its products alone{', MegaKernel' if part else ', its stages'}",
        need,
        seconds,
        (f"{measure} --output {FOLDER}/{file} {options}",),
        (file, file.replace(".csv", ".png"), file.replace(".csv", ".md")),
    )


CUTS = "--microbatches 512 1024 2048 --edges 0 1024"
PORT_GBPS = 92.5
"""A rank's share at W = 4 of a plain copy between two H200: 370 GB/s in results/data/collectives_scale_model_d453b1b.csv."""

COLLECTIVES_SWEEP = f"--microbatch-tokens 64 1024 4096 --ranks-per-phase 1 4 --rank-port-gbps 0 {PORT_GBPS:g}"
SIZES = "--stages --tokens 1024 2048 4096 8192 16384"
MEGAKERNEL_PLUG = f"--plug megakernel=results.megakernel_plug:plain_bypass {SIZES}"
INC_PLUG = f"--ranks 2 --plug megakernel_inc=results.megakernel_plug:inc {SIZES}"
FUSED_MODELS = (
    CommunicationModel.INC_ALL_TO_ALL,
    CommunicationModel.ALL_TO_ALL,
    CommunicationModel.INC_ALL_TO_ALL_PHASED,
    CommunicationModel.ALL_TO_ALL_PHASED,
)
HOST_FILE, PRODUCTS_FILE = f"moe_layer_host_{COMMIT}.csv", f"expert_matmul_native_{COMMIT}.csv"

STEPS: tuple[Step, ...] = (
    Step(
        "layer_on_host",
        "errors, rows, packets and steps of every implementation, on processes",
        Need.HOST,
        150,
        (f"{PYTHON} -m results.measure_on_host --commit {COMMIT} --output {FOLDER}/{HOST_FILE}",),
        (HOST_FILE, HOST_FILE.replace(".csv", ".md")),
    ),
    Step(
        "expert_products",
        "the expert products against torch's",
        Need.GPU,
        150,
        (f"{PYTHON} results/measure_expert_matmul.py --output {FOLDER}/{PRODUCTS_FILE}",),
        (PRODUCTS_FILE,),
    ),
    _collectives(Need.SCALE_MODEL, COLLECTIVES_SWEEP, 300),
    _collectives(Need.ONE_GPU, "--microbatch-tokens 64 1024", 120),
    _collectives(Need.NATIVE, COLLECTIVES_SWEEP, 300),
    *(_speed_ups(need, "", 0) for need in (Need.SCALE_MODEL, Need.NATIVE)),
    _speed_ups(Need.SCALE_MODEL, "_paced", PORT_GBPS),
    _speed_ups(Need.SCALE_MODEL, "_slow", PORT_GBPS / 4),
    *(_timeline(model) for model in FUSED_MODELS),
    _native_layer("", "", 240),
    _native_layer("megakernel", MEGAKERNEL_PLUG, 120),
    _native_layer("four_ranks", MEGAKERNEL_PLUG, 120, Need.FOUR_GPUS),
    _native_layer("two_and_two", INC_PLUG, 120, Need.FOUR_GPUS),
    _simulated("speed_up_against_ranks", 100),
    _simulated("speed_up_against_link", 30),
    _simulated("price_of_phases", 10),
    _simulated("best_microbatch", 10),
    _simulated("busiest_unit", 10),
    _simulated("two_level", 200),
    _simulated("phases_under_skew", 60),
    Step(
        "predicted",
        "the simulator, fitted to all measured data, against them",
        Need.MEASURED_DATA,
        240,
        (f"{PYTHON} -m inc_runtime simulate --calibrate {DATA} --name two_h200 --table {FOLDER}/predicted.md",),
        ("predicted.md",),
    ),
)

NO_STEP = (
    ("whole model in prefill, decode and both", "vLLM serves the fused layer on GPUs (README), no step drives it yet"),
    ("share of the MoE layers in the time of the model", "the same"),
    ("continuous batching: throughput, time to first token, inter-token latency", "the same"),
    ("vLLM's own MoE as the sixth implementation", "the same"),
)
"""What the evaluation asks for and no step measures, and why."""
