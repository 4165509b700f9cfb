"""`python -m tests.fuzz --cases N --seed S`: see `command.py`."""

import os
import sys

# Small programs that run once: most of the time goes into compiling, so XLA need not try hard. At
# level 0 they would not be made by the maker of kernels that makes them for users.
QUICK = "--xla_backend_optimization_level=1"


def main() -> int:
    """Set what JAX reads when it is imported, then run the command."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=12 {QUICK}")
    from tests.fuzz import command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
