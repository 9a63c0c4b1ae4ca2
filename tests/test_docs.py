"""The documentation names what the code has."""

import dataclasses
import re
from pathlib import Path

from trl import GRPOConfig

from trace_trl import TRACEConfig


ROOT = Path(__file__).parent.parent


def test_options_page_lists_every_option_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = {field.name: field.default for field in dataclasses.fields(TRACEConfig) if field.name not in inherited}
    assert {name: eval(default) for name, default in rows} == own


def test_no_page_has_gaps():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"@@|TODO|TBD", page.read_text()), page.name


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
