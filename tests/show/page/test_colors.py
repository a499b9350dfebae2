"""The page's colours have enough contrast in both themes and differ for colour-blind eyes."""

import re
from itertools import combinations

import numpy as np
import pytest

from jaxmem.show.page import assets

CATEGORIES = ("argument", "constant", "output", "residual", "temporary")
PALETTE = tuple(f"p{n}" for n in range(8))
DRAWN = (
    *(*CATEGORIES, "fragmentation", *PALETTE),
    *("other", "small", "inside", "limit", "within", "bad", "accent"),
)
TEXT = ("text", "faint", "good", "changed", "bad")
# Machado, Oliveira and Fernandes 2009, doi:10.1109/TVCG.2009.113: severity 1.0, in linear RGB.
BLIND = {
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}

TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def themes():
    """The variables of each theme; what is dark by the system's choice and by ours is the same."""
    blocks = re.findall(r":root[^{]*\{([^}]*--surface[^}]*)\}", assets.style())
    light, *dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    assert len(dark) == 2 and dark[0] == dark[1]
    assert light.keys() == dark[0].keys()
    return {"light": light, "dark": dark[0]}


def linear(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def contrast(one, other):
    """Contrast ratio of WCAG 2.2."""
    weights = (0.2126, 0.7152, 0.0722)
    light = [sum(w * c for w, c in zip(weights, linear(x), strict=True)) for x in (one, other)]
    return (max(light) + 0.05) / (min(light) + 0.05)


def seen(color, matrix):
    """CIE Lab of a colour as someone with that colour vision sees it."""
    rgb = np.clip(np.array(matrix) @ linear(color), 0, 1)
    xyz = np.array(TO_XYZ) @ rgb / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_drawn_and_what_is_read_stands_out(theme):
    colors = themes()[theme]
    for ground in ("surface", "ground"):
        for name in TEXT:
            assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    for name in DRAWN:
        assert contrast(colors[name], colors["surface"]) >= 3, name
    assert contrast(colors["text"], colors["accent-ground"]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", BLIND)
@pytest.mark.parametrize("names", [CATEGORIES, PALETTE], ids=["categories", "palette"])
def test_bands_differ_for_colour_blind_eyes(theme, vision, names):
    colors = themes()[theme]
    for one, other in combinations(names, 2):
        a, b = (seen(colors[name], BLIND[vision]) for name in (one, other))
        distance = np.linalg.norm(a - b)
        # 10 is four times what can just be told apart; bands also have names and gaps.
        assert distance >= 10, (one, other)
