"""Run checks with the kernels built for AddressSanitizer and UndefinedBehaviorSanitizer, whose
runtimes must have been preloaded:

    python -m tests.cuda.sanitized CHECK... [--mistake NAME]

With --mistake one of `MISTAKES` is made, to be seen to fail.
"""

from __future__ import annotations

import argparse

from tests.cuda.host import SANITIZERS, HostLauncher
from tests.cuda.mutants import Mutant, run_check

# Writes into shared memory that no comparison of results has to notice.
MISTAKES = {
    "beyond an array": Mutant("plain", "if (threadIdx.x >= TILE) return;"),
    "beyond shared memory": Mutant(
        "plain", "reinterpret_cast<float*>(shared.keys)", "reinterpret_cast<float*>(shared.rows[1])"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="+")
    parser.add_argument("--mistake", choices=MISTAKES)
    arguments = parser.parse_args()

    def edit(source: str) -> str:
        if arguments.mistake is None:
            return source
        mistake = MISTAKES[arguments.mistake]
        return source.replace(mistake.text, mistake.becomes)

    launcher = HostLauncher(num_resident=64, edit=edit, extra_flags=SANITIZERS)
    for check in arguments.checks:
        run_check(check, launcher)
    print("clean")


if __name__ == "__main__":
    main()
