"""`python -m inc_runtime`, and `torchrun --nproc-per-node N -m inc_runtime`: the same commands as `inc`."""

import sys

from inc_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
