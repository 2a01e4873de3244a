"""What only some installations have: packages that an extra of ours brings."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def needs_extra(name: str, what: str) -> Iterator[None]:
    """Imports inside the block may fail: then ``what`` cannot be had without an extra.

    Args:
        name: of the extra.
        what: the user asked for, as the subject of a sentence.

    Raises:
        ConfigError: says what to install.
    """
    try:
        yield
    except ImportError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "k3vl"):  # a defect, which no extra mends
            raise
        raise ConfigError(f"{what} needs {package}: pip install 'k3vl[{name}]'") from exc
