"""Serving the demo: the model is loaded, the page is built, and Gradio is locked down.

Loopback by default, uploads capped, nothing of the file system but uploads and Gradio's own cache,
no telemetry, no public link, no endpoints for other programs, no fetches at run time.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from k3vl.app.extras import needs_extra
from k3vl.app.inspect import media_config
from k3vl.errors import ConfigError
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from k3vl.vision.processor import MediaProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import gradio as gr

    from k3vl.app.chat_demo.model import ChatModel
    from k3vl.load import Device

_QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_SHARE": "False",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How the demo is served.

    Attributes:
        model: checkpoint directory, or ``demo``; the endpoint's name for it where there is one.
        base_url: an OpenAI-compatible endpoint; None is the embedded engine.
        api_key: for the endpoint; no visitor sees it.
        device: where the model runs.
        tensor_parallel: GPUs of this host that share it.
        host, port: address to listen on; port None takes the first free one from 7860.
        max_file_mb: uploads above this many megabytes are refused.
        open_browser: open a tab.
        auth: name and password asked of visitors.
    """

    model: str = "demo"
    device: Device = "auto"
    tensor_parallel: int = 1
    host: str = "127.0.0.1"
    port: int | None = None
    max_file_mb: int = 200
    open_browser: bool = False
    auth: tuple[str, str] | None = None
    base_url: str | None = None
    api_key: str | None = None


def parse_auth(text: str | None) -> tuple[str, str] | None:
    """``NAME:PASSWORD`` to a pair.

    Raises:
        ConfigError: there is no colon, or nothing on one of its sides.
    """
    if text is None:
        return None
    name, _, password = text.partition(":")
    if not (name and password):
        raise ConfigError("auth must be NAME:PASSWORD")
    return name, password


def run_demo(settings: DemoSettings, *, say: Callable[[str], None]) -> None:
    """Load the model and serve until interrupted.

    Args:
        settings: what and where.
        say: takes lines for the terminal.

    Raises:
        ConfigError: Gradio is not installed, or the model or the address cannot be used.
        WeightError: the checkpoint's tensors are not usable.
    """
    _require_gradio()
    check_address(settings.host, settings.port)
    with open_model(settings, say=say) as model:
        page = open_demo(model, settings)
        say(f"k3vl demo: {page.local_url}")
        if not is_loopback(settings.host) and settings.auth is None:
            say(f"warning: {settings.host} is open to the network; --auth asks for a password")
        try:
            page.block_thread()
        finally:
            page.close(verbose=False)


@contextmanager
def open_model(settings: DemoSettings, *, say: Callable[[str], None]) -> Iterator[ChatModel]:
    """Load the checkpoint, or reach the endpoint.

    Raises:
        ConfigError: neither can be used.
        WeightError: the checkpoint's tensors are not usable.
    """
    if settings.base_url is not None:
        with needs_extra("demo", "--base-url"):
            from k3vl.app.chat_demo.remote import RemoteChat

        remote = RemoteChat(
            settings.base_url,
            settings.model,
            MediaProcessor(media_config("k3")),
            api_key=settings.api_key,
        )
        remote.check()
        yield remote
        return
    say(f"loading {settings.model} ...")
    with Pipeline.load(
        settings.model, device=settings.device, tensor_parallel=settings.tensor_parallel
    ) as pipeline:
        warm_up(pipeline)
        yield pipeline


def check_address(host: str, port: int | None) -> None:
    """Try an address before the model is loaded for it; any port where none is asked for.

    Raises:
        ConfigError: it is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port or 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise ConfigError(f"{host}:{port or 'any port'}: {exc.strerror}") from exc


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; of names only localhost is believed."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warm_up(pipeline: Pipeline) -> None:
    """Answer once, so that the first visitor does not wait for what happens on first use."""
    picture = MediaPart("image", Image.new("RGB", (56, 56), "white"))
    message = Message(role="user", parts=(picture, TextPart("What is this?")))
    pipeline.reply([message], sampling=SamplingParams(max_tokens=2))


def open_demo(
    model: ChatModel, settings: DemoSettings, *, examples: Path | None = None
) -> gr.Blocks:
    """Start serving a model; returns at once.

    Args:
        model: answers; stays the caller's to close.
        settings: address and caps; what says which model it is is not looked at.
        examples: folder of example pictures; by default the repository's.

    Raises:
        ConfigError: the address cannot be used.
    """
    _require_gradio()
    from starlette.middleware import Middleware

    from k3vl.app.chat_demo import look
    from k3vl.app.chat_demo.examples import example_folder
    from k3vl.app.chat_demo.guard import UploadsOnly
    from k3vl.app.chat_demo.page import build_page
    from k3vl.app.chat_demo.session import Sessions

    page = build_page(model, Sessions(model), examples or example_folder())
    page.queue(default_concurrency_limit=16, max_size=256, api_open=False)
    try:
        page.launch(
            server_name=settings.host,
            server_port=settings.port,
            inbrowser=settings.open_browser,
            auth=settings.auth,
            prevent_thread_lock=True,
            quiet=True,
            theme=look.theme(),
            css=look.CSS,
            head=look.HEAD,
            app_kwargs={"middleware": [Middleware(UploadsOnly)]},
            **_locked(settings),
        )
    except OSError as exc:
        raise ConfigError(f"{settings.host}:{settings.port or 7860}: {exc}") from exc
    return page


def _locked(settings: DemoSettings) -> dict[str, Any]:
    """Everything that Gradio could offer beyond the page is off."""
    return {
        "share": False,
        "allowed_paths": [],
        "max_file_size": f"{settings.max_file_mb}mb",
        "strict_cors": True,
        "ssr_mode": False,
        "pwa": False,
        "mcp_server": False,
        "enable_monitoring": False,
        "footer_links": [],
        "show_error": False,
    }


def _require_gradio() -> None:
    """Import Gradio with its telemetry off.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.update(_QUIET)
    with needs_extra("demo", "the demo"):
        import gradio  # noqa: F401
