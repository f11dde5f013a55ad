"""Fixtures that build the report of a small network and the site once, and start a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from browsers import chromium
from report_pages import Classifier, Page
from torch import nn

import rnnlens as rl


@pytest.fixture(scope="session")
def batch():
    """Return x (40 samples, 12 steps, 3 features) and y, the class (0 to 2) of the first feature at the first step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 12, 3)).astype("float32")
    return torch.tensor(x), torch.tensor(np.digitize(x[:, 0, 0], [-0.5, 0.5]))


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(1)
    classifier = Classifier()
    with torch.no_grad():  # must differ from the re-initialised model
        for name, weight in classifier.rnn.named_parameters():
            weight.add_(0.5 if "bias_ih" in name else 0.0)
    return classifier


@pytest.fixture(scope="session")
def page(model, batch, tmp_path_factory):
    """Return the report of the model, with a re-initialised copy as baseline."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    rl.report(model, *batch, path=path, loss=nn.functional.cross_entropy, baseline="init", title="A small LSTM")
    return Page(path)


@pytest.fixture
def report_of(tmp_path):
    """Return a function that writes a report and reads it back."""

    def write_report(*arguments, **options) -> Page:
        return Page(rl.report(*arguments, path=tmp_path / "r.html", **options))

    return write_report


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the site, assert that MkDocs does not warn, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    root, environment = Path(__file__).resolve().parents[2], {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    completed = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert (
        re.findall(r"^.*WARNING +-.*$", completed.stderr, re.MULTILINE) == []
    )  # MkDocs' format of warnings, not TensorFlow's
    return folder


@pytest.fixture(scope="session")
def browser():
    """Start Chromium under Playwright; fail if there is none, since `make test` leaves these tests out without one."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    assert path is not None, "no Chromium: apt-get install chromium"
    with sync_playwright() as player:
        instance = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def reader(browser, page, tmp_path):
    """Return a function that opens a report from disk, offline; errors and console messages fail the test."""
    complaints, contexts = [], []

    def open_(path=None, **options):
        context = browser.new_context(**{"offline": True, "viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        sheet = context.new_page()
        sheet.set_default_timeout(60_000)  # milliseconds: long enough for a busy machine
        sheet.on("console", lambda message: complaints.append(message.text))
        sheet.on("pageerror", lambda error: complaints.append(str(error)))
        sheet.on("requestfailed", lambda request: complaints.append(f"asked for {request.url}"))
        sheet.goto((path or page.path).as_uri())
        if options.get("java_script_enabled", True):
            sheet.wait_for_selector("html[data-ready]", state="attached")
        return sheet

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
