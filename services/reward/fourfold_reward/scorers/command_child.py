"""Becomes the program of a command scorer: `python -m fourfold_reward.scorers.command_child ARGUMENTS`.

It enters the sandbox, which the program inherits, and replaces itself by the program. A pipe tells the service that
this worked: the kernel closes it when the program starts, and otherwise it has the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent


def main(arguments: list[str]) -> int:
    """Start the program. `arguments[0]` is JSON: parent, report, policy, program, words, environment."""
    request: dict[str, Any] = json.loads(arguments[0])
    die_with_parent(request["parent"])
    report = int(request["report"])
    os.set_inheritable(report, False)
    try:
        if request["policy"]:
            sandbox.enter(sandbox.Policy.from_json(request["policy"]))
        os.execve(request["program"], request["words"], json.loads(os.environ["FOURFOLD_COMMAND_ENVIRONMENT"]))
    except (OSError, sandbox.SandboxUnavailable) as error:
        os.write(report, str(error).encode()[:1000])
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
