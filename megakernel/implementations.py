"""Which communication models each implementation can run on; the first is its own."""

from __future__ import annotations

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
            f"implementation = {implementation.value}: its communication model must be {names}, "
            f"but the heap was made for {model.value}. Join the job with that model."
        )
