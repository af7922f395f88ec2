"""What a manifest says of its text's licence."""

import json
from dataclasses import asdict

import pytest

from needlework.data import DOLMA, FINEPDFS, FINEWEB_EDU_10BT, Files, Packages
from needlework.data.licence import licence_of


def of(source):
    return licence_of({"kind": "store", "source": json.loads(json.dumps(asdict(source)))})


@pytest.mark.parametrize(("source", "name"), [(FINEWEB_EDU_10BT, "odc-by"), (DOLMA, "odc-by"), (FINEPDFS, None)])
def test_a_data_set_of_the_hub_has_the_licence_of_its_page(source, name):
    found = of(source)
    assert found.name == name and (source.files or (source.path,))[0] in found.says
    assert ("under odc-by" if name else "needlework does not know it") in found.says


def test_what_is_not_known_is_said_to_be_unknown():
    assert of(Packages()).says.startswith("The text is installed Python packages, each under its own licence")
    for manifest in ({"kind": "files"}, {"kind": "store", "source": json.loads(json.dumps(asdict(Files(paths=("a",)))))}):
        assert licence_of(manifest).name is None and "does not know their licence" in licence_of(manifest).says
    assert licence_of({"kind": "stdlib", "python": "3.12.3"}).says.startswith(
        "The text is the standard library of Python 3.12.3"
    )
