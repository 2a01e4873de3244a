"""What the plugin is told when SGLang starts: one object under ``k3vl`` in ``--mm-process-config``.

SGLang keeps that option for each model's own processor and hands it on unread, so the settings
reach every process that makes one, on every rank, without a file or a variable of their own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import TypeAdapter, ValidationError

from k3vl.errors import ConfigError
from k3vl.vision.limits import MediaLimits
from k3vl.vision.source import FetchPolicy
from k3vl.vision.workers import DEFAULT_MEMORY, num_workers_here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY: Final = "k3vl"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """How media are taken.

    Attributes:
        parity: pictures go SGLang's own way, to the byte: EXIF orientation ignored, 16-bit grey
            clipped. Off, they go ours, as in the embedded engine. Clips always go ours.
        limits: what one picture or clip may cost.
        max_media_bytes: largest file, decoded from base64 or fetched.
        media_root: directory that ``file:`` URLs and paths may point into; None: none may.
        allow_private_networks: also fetch from loopback, private and link-local addresses.
        media_workers: decoding processes of each of SGLang's tokenizer processes; by default by
            the number of CPUs.
        media_seconds: longest decoding of one picture or clip.
        media_memory: bytes that one decoding process may have.
    """

    parity: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)
    max_media_bytes: int = 256 * 2**20
    media_root: str | None = None
    allow_private_networks: bool = False
    media_workers: int = field(default_factory=num_workers_here)
    media_seconds: float = 60.0
    media_memory: int = DEFAULT_MEMORY

    @classmethod
    def from_process_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the value of ``--mm-process-config``; what it does not name keeps its default.

        Raises:
            ConfigError: a field is not known or not of its type.
        """
        data = config.get(KEY, {})
        if not isinstance(data, dict):
            raise ConfigError(f"mm-process-config: '{KEY}' must be an object")
        _only_known(data, cls, KEY)
        _only_known(data.get("limits", {}), MediaLimits, f"{KEY}.limits")
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
            path = ".".join([KEY, *map(str, first["loc"])])
            raise ConfigError(f"mm-process-config: field '{path}': {first['msg']}") from exc

    def process_config(self) -> str:
        """The value for ``--mm-process-config``."""
        return json.dumps({KEY: asdict(self)})

    def fetch_policy(self, allowed_domains: Sequence[str] = ()) -> FetchPolicy:
        """What may be fetched.

        Args:
            allowed_domains: SGLang's ``--allowed-media-domains``. Where it names some, redirects
                are not followed, because they could lead out of them; the first hop is checked by
                whoever knows the request.
        """
        root = None if self.media_root is None else Path(self.media_root)
        return FetchPolicy(
            schemes=frozenset(
                {"data", "http", "https"} | ({"file"} if root is not None else set())
            ),
            file_root=root,
            max_bytes=self.max_media_bytes,
            allow_private_networks=self.allow_private_networks,
            max_redirects=0 if allowed_domains else FetchPolicy().max_redirects,
        )


def _only_known(data: Any, cls: type[Any], where: str) -> None:
    """A misspelt limit must not be a limit that does not hold."""
    if not isinstance(data, dict):
        return
    known = {item.name for item in fields(cls)}
    for name in data:
        if name not in known:
            raise ConfigError(f"mm-process-config: '{where}' has no field '{name}'")
