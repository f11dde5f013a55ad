"""Versions, workflows and citation agree with pyproject.toml and the Makefile."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
TARGETS = set(re.findall(r"^([\w%.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def requirements():
    """Return the direct dependencies of the project, of its extras and of its dependency groups."""
    groups = chain(*PROJECT["project"]["optional-dependencies"].values(), *PROJECT["dependency-groups"].values())
    names = [*PROJECT["project"]["dependencies"], *(entry for entry in groups if isinstance(entry, str))]
    return [Requirement(name) for name in names]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_dependency_has_an_exact_version(requirement):
    locked = [line for line in CONSTRAINTS if canonicalize_name(line.name) == canonicalize_name(requirement.name)]
    assert locked, "make lock"
    for line in locked:
        (version,) = line.specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), "make lock"


def test_constraints_name_no_place_to_install_from():
    assert [str(line) for line in CONSTRAINTS if line.url] == []


def test_workflows_call_targets_of_the_makefile():
    commands = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        commands += [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert len(commands) > 5
    for command in commands:
        target = re.fullmatch(r"make ([\w-]+)(\$\{\{ matrix\.python \}\})?( PYTHON=python)?", command)
        assert target, command
        assert target[1] + ("%" if target[2] else "") in TARGETS, command


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
