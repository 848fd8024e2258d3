"""Converts run configurations of other systems into recipes: OpenRLHF, TRL and verl.

    shell.py             script -> the words of its training command, without running anything
    documents.py         YAML file, or keyword arguments of a Python file -> names and values
    flags.py             names and values -> typed flags of a table; unknown names with the nearest known one
    openrlhf.py, ...     one table per system: flag -> recipe key, conversion, or the reason why there is none
    openrlhf_rules.py    the conversions that need more than one flag
    openrlhf_rows.py     trainers whose data has the answers (SFT, DPO ...): flags and conversions; also trl_rows.py
    openrlhf_shared.py   conversions of the flags that all trainers of a system have; also trl_shared.py
    draft.py             lines with their flags -> recipe with comments, and the report of what was not converted

The pages docs/migration/*.md have the same tables; `python -m fourfold_tools.migrate.pages SYSTEM` prints them.
"""
