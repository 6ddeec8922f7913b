"""Which communication models each implementation can run on; the first is its own. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from inc_runtime.config import CommunicationModel as Model
from inc_runtime.config import Implementation
from inc_runtime.errors import ConfigurationError

MODELS_OF: dict[Implementation, tuple[Model, ...]] = {
    Implementation.BASELINE: (Model.ALL_TO_ALL, Model.ALL_GATHER_REDUCE_SCATTER),
    Implementation.MEGAKERNEL: (Model.ALL_TO_ALL, Model.ALL_GATHER_REDUCE_SCATTER),
    Implementation.MEGAKERNEL_PHASED: (Model.ALL_TO_ALL_PHASED,),
    Implementation.MEGAKERNEL_INC: (Model.INC_ALL_TO_ALL, Model.INC_ALL_GATHER_REDUCE_SCATTER),
    Implementation.MEGAKERNEL_INC_PHASED: (
        Model.INC_ALL_TO_ALL_PHASED,
        Model.INC_ALL_GATHER_REDUCE_SCATTER_PHASED,
    ),
}


def check_model(implementation: Implementation, model: Model) -> None:
    """Refuse an implementation on a heap that was laid out for a model it does not run."""
    if model not in MODELS_OF[implementation]:
        names = " or ".join(m.value for m in MODELS_OF[implementation])
        raise ConfigurationError(
            f"implementation = {implementation.value} on {model.value}: its communication model must be {names}. "
            "Choose that model for the heap, or another implementation."
        )


@dataclass(frozen=True)
class Case:
    """One row of the comparison: an implementation on a communication model."""

    implementation: Implementation
    model: Model

    @property
    def name(self) -> str:
        return f"{self.implementation.value}-{self.model.value}"

    @property
    def needs_heap(self) -> bool:
        return self.implementation is not Implementation.BASELINE


ALL_CASES = tuple(Case(implementation, model) for implementation, models in MODELS_OF.items() for model in models)


def case_of(implementation: str, collective: str | None) -> Case:
    """The case that two names choose; the implementation's own model if `collective` is None."""
    chosen = Implementation(implementation)
    model = MODELS_OF[chosen][0] if collective is None else Model(collective)
    check_model(chosen, model)
    return Case(chosen, model)


def case_of_name(name: str) -> Case:
    """The inverse of `Case.name`."""
    return next(case for case in ALL_CASES if case.name == name)
