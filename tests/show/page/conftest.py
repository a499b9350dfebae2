"""The browser that pages are opened in."""

from __future__ import annotations

import pytest

from tests.show.page.browsing import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started
