"""Record which experts a model chooses on a text, for `routing.kind = "recorded"` of the simulator.

    python -m results.record_routing CHECKPOINT experts.npy --layer 3 --tokens 4096
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from inc_runtime.errors import IncError
from inc_runtime.routing import route
from megakernel.checkpoint import load_gate, read_layer_shape
from megakernel.olmoe import demo_text, hidden_states_of_text


def record(checkpoint: Path, layer: int, text: str, num_tokens: int) -> np.ndarray:
    """Expert ids of the tokens of `text` in MoE layer `layer`: [num_tokens, k] int32, in order of the text."""
    rows = hidden_states_of_text(checkpoint, layer, text, num_tokens).float()
    logits = rows @ load_gate(checkpoint, layer).float().T
    return route(logits.numpy(), read_layer_shape(checkpoint))[0]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face OLMoE folder")
    parser.add_argument("output", type=Path, help="a .npy file")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--text", type=Path, help="a text file (default: the demo's text)")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8") if options.text else demo_text()
    try:
        ids = record(options.checkpoint, options.layer, text, options.tokens)
    except IncError as error:
        print(f"record_routing: error: {error}", file=sys.stderr)
        return 2
    np.save(options.output, ids)
    print(f"wrote {options.output}: {len(ids)} tokens, {len(np.unique(ids))} experts chosen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
