"""The models refuse a release of transformers that hands them the cache under a name that they do not know."""

import re
from importlib.metadata import requires

import pytest
import transformers

from needlework.models.versions import FIRST, NEXT, check


@pytest.mark.parametrize("version", ("5.17.0", "5.23.9", transformers.__version__))
def test_releases_that_were_tried_pass(version):
    check(version)


@pytest.mark.parametrize("version", ("4.57.6", "5.16.1", "5.24.0", "5.24.0rc1", "6.0.0"))
def test_others_are_refused_with_what_to_install(version):
    with pytest.raises(ImportError, match=re.escape(f"{version} is installed; pip install 'transformers>=5.17,<5.24'")):
        check(version)


def test_the_package_asks_for_the_same_releases():
    (line,) = (one for one in requires("needlework") or () if one.startswith("transformers"))
    bounds = {f">={'.'.join(map(str, FIRST))}", f"<{'.'.join(map(str, NEXT))}"}
    assert bounds == set(re.findall(r"[<>=]+[\d.]+", line.partition(";")[0]))
