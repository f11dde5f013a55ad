"""Messages of Python calls say on the command line what to type there."""

import subprocess
import sys

import pytest

from rnnlens.cli.console import in_command_line

LINES = {
    "  try:      loss=torch.nn.functional.mse_loss": "  try:      --loss mse",
    "  try:      loss=torch.nn.functional.cross_entropy": "  try:      --loss cross_entropy",
    '  try:      model.compile(loss=...), or pass loss=, such as loss="mse"': "  try:      --loss mse",
    "  try:      loss=lambda output, y: criterion(output[0], y), where criterion is yours": (
        "  try:      --loss my_module:loss, in which loss = lambda output, y: criterion(output[0], y)"
    ),
    "  try:      y.argmax(-1) in place of y": "  try:      y.argmax(-1), saved as y of the data file",
    "  got:      loss=torch.nn.functional.mse_loss": "  got:      loss=torch.nn.functional.mse_loss",
}


@pytest.mark.parametrize(("line", "expected"), LINES.items())
def test_only_what_is_expected_and_what_to_try_is_reworded(line, expected):
    assert in_command_line(f"Problem with loss=lambda y: y.\n{line}") == f"Problem with loss=lambda y: y.\n{expected}"


def test_the_package_itself_is_run_as_the_command(tmp_path):
    """A file of the current folder takes the place of no library, as with ``python -m rnnlens.cli``."""
    (tmp_path / "typer.py").write_text("raise SystemExit('the wrong typer')")
    command = [sys.executable, "-m", "rnnlens", "nothing"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert "nothing" in completed.stderr
    assert "wrong typer" not in completed.stderr
