"""The built-in verifier `code_tests`: runs the code of a completion against the tests of its row.

    worker --fork--> scoring process: has the tests, decides the verdict
       |                   |  a socket per test: calls and values, or stdin and stdout
    starts once            |
       |                   v
    zygote ----fork---> runner: has the code and the inputs of one test, and nothing else

The code never meets an expected result, neither in its process nor in the memory that a fork inherits, and the verdict
is decided in a process in which no text of the policy runs. What the runner sends is parsed as data with limits.
"""

from __future__ import annotations
