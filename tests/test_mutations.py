"""mutations.txt is of the code as it stands: its texts are there, and so are its tests."""

import re

import pytest
from mutations import all_mutations, patched
from methods import ROOT


@pytest.mark.parametrize("mutation", all_mutations(), ids=lambda mutation: mutation.name)
def test_the_text_and_the_test_are_there(mutation):
    assert mutation.old != mutation.new and patched(mutation)
    file, _, test = mutation.test.partition("::")
    source = (ROOT / file).read_text()
    assert re.search(rf"^def {test.partition('[')[0]}\(", source, re.M), test
