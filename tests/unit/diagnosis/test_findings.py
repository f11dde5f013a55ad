"""The table of findings names every code that a rule gives."""

import ast
from pathlib import Path

import rnnlens
from rnnlens.diagnosis.findings import SHOWN_BY

RULES = Path(rnnlens.__file__).parent / "diagnosis" / "findings.py"


def codes_of_rules():
    calls = [n for n in ast.walk(ast.parse(RULES.read_text())) if isinstance(n, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "Finding"}


def test_the_table_names_every_code_that_a_rule_gives():
    assert codes_of_rules() == set(SHOWN_BY)
