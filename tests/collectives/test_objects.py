"""Objects between members: pickled, sealed, and refused from others."""

from __future__ import annotations

import pytest

from sparkdl.collectives.objects import open_sealed, sealed
from sparkdl.core.errors import CollectiveError


def test_object_comes_as_it_was() -> None:
    value = {"f": lambda x: x + 1, "n": [1, 2]}
    opened = open_sealed(sealed(value, b"key"), b"key")
    assert opened["n"] == [1, 2]
    assert opened["f"](1) == 2


class Dangerous:
    """Does harm where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("where", [0, 31, 32, -1])
def test_nothing_is_unpickled_that_was_not_sealed_by_a_member(where: int) -> None:
    data = bytearray(sealed(Dangerous(), b"key"))
    with pytest.raises(CollectiveError, match="no member of this group has sent"):
        open_sealed(bytes(data), b"another key")
    data[where] ^= 1
    with pytest.raises(CollectiveError, match="no member of this group has sent"):
        open_sealed(bytes(data), b"key")
    with pytest.raises(CollectiveError, match="no member of this group has sent"):
        open_sealed(b"", b"key")
