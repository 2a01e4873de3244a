"""The demo in a process of its own: Gradio leaves event loops and sockets open in its host.

``python -m tests.app.chat_server '{"scripts": [...], "delay": 0.1}'`` writes its URL, then answers
every line of its standard input with the state of its backend, and ends with it. Without scripts it
serves the demo checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Site:
    """A running demo."""

    url: str
    process: subprocess.Popen[str]

    def state(self) -> dict[str, Any]:
        """``running``: requests in the engine; ``count``, ``asked``: prompts and the
        last one's text (scripts only)."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("state\n")
        stdin.flush()
        return json.loads(stdout.readline())


@contextmanager
def serve(
    *scripts: str,
    delay: float = 0.0,
    by_word: dict[str, str] | None = None,
    over_http: bool = False,
    **settings: Any,
) -> Iterator[Site]:
    """``over_http``: the model is behind an endpoint of the same process."""
    plan = json.dumps(
        {
            "scripts": scripts,
            "delay": delay,
            "by_word": by_word,
            "over_http": over_http,
            "settings": settings,
        }
    )
    with subprocess.Popen(
        [sys.executable, "-m", "tests.app.chat_server", plan],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), f"the demo did not start: {url!r}"
            yield Site(url.rstrip("/"), process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


def main(plan: dict[str, Any], commands: IO[str]) -> None:
    from k3vl.app.chat_demo.launch import DemoSettings, open_demo, open_model
    from k3vl.pipeline import Pipeline
    from tests.app.chat_fakes import scripted
    from tests.app.serving import in_thread

    scripts = plan["scripts"]
    if scripts:
        pipeline = scripted(*scripts, delay=plan["delay"], by_word=plan["by_word"])
    else:
        pipeline = Pipeline.load()
    with ExitStack() as stack:
        settings = DemoSettings(**plan["settings"])
        model = pipeline
        if plan["over_http"]:
            url, _ = stack.enter_context(in_thread(pipeline))
            settings = replace(settings, base_url=f"{url}/v1", model="demo")
            model = stack.enter_context(open_model(settings, say=print))
        page = open_demo(model, settings)
        sys.stdout.write(f"{page.local_url}\n")
        sys.stdout.flush()
        answer_states(pipeline, scripts, commands)
        page.close(verbose=False)
    pipeline.close()


def answer_states(pipeline: Any, scripts: list[str], commands: IO[str]) -> None:
    for _ in commands:
        if scripts:
            state = {
                "running": sorted(pipeline.backend.running),
                "count": len(pipeline.backend.prompts),
                "asked": pipeline.backend.asked() if pipeline.backend.prompts else "",
            }
        else:
            state = {"running": sorted(pipeline.backend._engine.jobs)}
        sys.stdout.write(f"{json.dumps(state)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.stdin)
