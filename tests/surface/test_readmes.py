"""Every source file is described in the README of its folder, or of the nearest parent folder that has one."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "src" / "rnnlens"
GRAPHS = ROOT / "packages" / "rnnlens-tf1" / "src" / "rnnlens_tf1"
ROOMS = sorted({CODE / file.relative_to(CODE).parts[0] for file in CODE.rglob("*/*.py")})
FOLDERS = sorted({file.parent for code in (CODE, GRAPHS) for file in code.rglob("*.py")})
GUIDES = sorted(guide for code in (CODE, GRAPHS) for guide in code.rglob("README.md"))


def guide_of(folder):
    """Return the document that describes a folder: the nearest README, or docs/architecture.md for the package."""
    if folder == CODE:
        return ROOT / "docs" / "architecture.md"
    return folder / "README.md" if (folder / "README.md").exists() else guide_of(folder.parent)


def missing_files(folder):
    guide = guide_of(folder)
    text = guide.read_text("utf-8")
    files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    base = guide.parent if guide.parent in folder.parents else folder
    return [f.name for f in files if f"`{f.relative_to(base).as_posix()}`" not in text and f"`{f.name}`" not in text]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_every_file_has_its_line(folder):
    assert not missing_files(folder), f"{guide_of(folder).relative_to(ROOT)} does not name these"


@pytest.mark.parametrize("folder", ROOMS)
def test_every_room_has_a_guide(folder):
    assert (folder / "README.md").exists()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.parent.name)
def test_no_line_is_about_a_file_that_is_gone(guide):
    lines = [line.split("|")[1] for line in guide.read_text("utf-8").splitlines() if line.startswith("| `")]
    names = [name for line in lines for name in line.split("`")[1::2] if name.endswith((".py", "/"))]
    assert not [name for name in names if not (guide.parent / name).exists()]
