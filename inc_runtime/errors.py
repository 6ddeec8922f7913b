"""Every error of the runtime. A message says who, what was expected, what was seen, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


class IncError(Exception):
    """Base of all errors that the runtime raises on purpose."""


class ConfigurationError(IncError, ValueError):
    """A value that the user gave cannot work; raised before anything starts."""


class CheckpointError(IncError):
    """A checkpoint folder lacks a file or a tensor, or holds one of the wrong shape."""


class UnknownRegion(IncError, KeyError):
    """A verb named a region that the role of that PE does not have."""


class HeapTooLarge(IncError):
    """The symmetric heap does not fit in shared memory."""


class BuildError(IncError):
    """A kernel could not be compiled or linked, or no compiler was found."""


class PlacementError(IncError):
    """The GPUs, MPS or NVSHMEM cannot carry the job as placed."""


class PeerMissing(IncError):
    """A PE of the job never appeared, or has another heap layout."""


class Mismatch(IncError):
    """Two PEs disagree on a value that must be equal on all of them."""


class ProtocolViolation(IncError):
    """A rule of the protocol was broken: a second writer of a flag, or a magic that does not increase."""


class ResultWrong(IncError):
    """A run finished, but its output is further from the reference than its number formats allow."""


class Deadlock(IncError):
    """The simulator has no event left while role programs still wait."""


@dataclass
class WaitRecord:
    """What a waiter knew when it gave up: enough to find the culprit. `word` values are signal words."""

    role: str
    tag: str
    microbatch: int
    slot: int
    magic: int
    expected: int
    seen: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    waited_s: float = 0.0
    cause: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def sentence(self) -> str:
        arrived = [name for name in self.seen if name not in self.missing]
        last = ", ".join(f"{name} (its flag holds magic {self.seen.get(name, 0) >> 1})" for name in self.missing)
        return (
            f"{self.role} waited {self.waited_s:.3g} s at {self.tag} for microbatch {self.microbatch} "
            f"(slot {self.slot}, magic {self.magic}). Arrived: {', '.join(arrived) or 'nobody'}. "
            f"Missing: {last or 'nobody'}."
        )


class ArrivalTimeout(IncError):
    """A wait reached its limit. `record` holds role, tag, microbatch, slot, words and who is missing."""

    def __init__(self, record: WaitRecord, remedy: str = "") -> None:
        self.record = record
        super().__init__(f"{record.cause} {record.sentence()} {remedy}".strip())


class PeerDied(ArrivalTimeout):
    """A process of the job ended while another waited for it."""


class Aborted(IncError):
    """Another PE raised the abort word; its own report names the cause."""
