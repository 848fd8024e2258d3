"""Becomes a program of a user: `python -m fourfold.workers.program PARENT POLICY REPORT PROGRAM WORD...`.

It enters the sandbox, which the program inherits, and replaces itself by the program. A pipe tells the service that
this worked: the kernel closes it when the program starts, and otherwise it has the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent

VARIABLES: Final = "FOURFOLD_COMMAND_ENVIRONMENT"
"""Environment variable with the variables of the program as JSON."""


def main(arguments: list[str]) -> int:
    """Start the program. `Child.start_program` passes the arguments."""
    parent, policy, report, program, *words = arguments
    die_with_parent(int(parent))
    os.set_inheritable(int(report), False)
    try:
        if policy:
            sandbox.enter(sandbox.Policy.from_json(policy))
        os.execve(program, words, json.loads(os.environ[VARIABLES]))
    except (OSError, sandbox.SandboxUnavailable) as error:
        os.write(int(report), str(error).encode()[:1000])
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
