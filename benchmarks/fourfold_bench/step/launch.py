"""Runs `fourfold run` in a folder of the benchmark, because the run folder is made in the working directory.

python -m fourfold_bench.step.launch FOLDER RECIPE
"""

from __future__ import annotations

import os
import sys

from fourfold.cli.main import main
from fourfold.host.process_tree import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.chdir(sys.argv[1])
    sys.exit(main(["run", sys.argv[2]]))
