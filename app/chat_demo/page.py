"""The demo's page: components, and which of a visitor's actions calls what.

The conversation itself lies in ``session.py``, on the server; the browser is sent rows to show and
is never asked for the history, so it cannot smuggle anything into it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator  # noqa: TC003 - Gradio evaluates handlers' annotations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import gradio as gr

from k3vl.app.chat_demo import look
from k3vl.app.chat_demo.examples import chat_examples
from k3vl.app.chat_demo.figures import figures_html
from k3vl.app.chat_demo.rows import chat_rows
from k3vl.app.chat_demo.session import ChatSettings, Session, Sessions
from k3vl.errors import TemplateError
from k3vl.types import ChatOptions, SamplingParams
from k3vl.xtml.messages import parse_tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.app.chat_demo.model import ChatModel
    from k3vl.app.chat_demo.seen import Seen

_Answering: TypeAlias = "Callable[..., AsyncIterator[tuple[Any, ...]]]"
_EFFORTS = ("low", "high", "max")
_FILE_TYPES = [
    *("image", "video", ".heic", ".heif", ".avif", ".tif", ".tiff"),
    *(".mkv", ".avi", ".mov", ".ts", ".m2ts", ".flv", ".wmv"),
]
_MAX_GENERATED = 8192
_CONCURRENCY = 16
_CLEAN_UP = (3600, 86400)  # seconds: every hour, uploads older than a day are deleted


class _View(NamedTuple):
    """What handlers write to; the order is that of their results."""

    chat: gr.Chatbot
    box: gr.MultimodalTextbox
    figures: gr.HTML
    seen: gr.Gallery
    facts: gr.HTML
    result: gr.Textbox


def build_page(model: ChatModel, sessions: Sessions, examples: Path) -> gr.Blocks:
    """Lay the page out and wire it to the sessions.

    Args:
        model: whose defaults and name are shown.
        sessions: conversations by tab.
        examples: folder of example pictures; may be absent.
    """
    demo_model = model.name == "demo"
    page: gr.Blocks = gr.Blocks(
        title="k3vl", analytics_enabled=False, fill_height=True, delete_cache=_CLEAN_UP
    )
    with page:
        with gr.Sidebar(label="Settings", open=False, position="right", width=320):
            settings = _drawer(model.defaults)
        with gr.Row(elem_id="k3-head"):
            gr.HTML(look.header(Path(model.name).name), padding=False)
            fresh = gr.Button("New chat", size="sm", variant="secondary")
            drawer = gr.Button("Settings", size="sm", variant="secondary")
            dark = gr.Button("Light / dark", size="sm", variant="secondary")
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=320, elem_classes="k3-main"):
                view_chat = _chatbot(look.intro(demo_model=demo_model), examples, demo_model)
                result = _result_box()
                box = _box()
            with gr.Column(scale=2, min_width=300, elem_classes="k3-side"):
                gr.HTML(look.section("Figures of the last answer"), padding=False)
                figures = gr.HTML(figures_html(None), padding=False, elem_id="k3-figures")
                gr.HTML(look.section("What the model sees", look.SEEN_HINT), padding=False)
                seen = _gallery()
                facts = gr.HTML(look.SEEN_EMPTY, padding=False, elem_id="k3-facts")
        view = _View(view_chat, box, figures, seen, facts, result)
        _wire(page, sessions, view, settings)
        _at_once(fresh.click, _clearer(sessions), list(view))
        dark.click(None, None, None, js=look.TOGGLE_THEME)
        drawer.click(None, None, None, js=look.TOGGLE_DRAWER)
    return page


# ---------------------------------------------------------------------- components


def _chatbot(intro: str, folder: Path, demo_model: bool) -> gr.Chatbot:
    return gr.Chatbot(
        elem_id="k3-chat",
        show_label=False,
        height=None,
        layout="bubble",
        editable="user",
        # Grouped with a picture, a text cannot be edited: Gradio 6.31 fails on the picture.
        group_consecutive_messages=False,
        buttons=["copy"],
        feedback_options=None,
        allow_tags=False,
        placeholder=intro,
        examples=(chat_examples(folder) or None) if demo_model else None,
    )


def _box() -> gr.MultimodalTextbox:
    return gr.MultimodalTextbox(
        elem_id="k3-box",
        show_label=False,
        placeholder="Ask about a picture or clip",
        file_count="multiple",
        file_types=_FILE_TYPES,
        sources=["upload"],
        max_lines=8,
        autofocus=True,
    )


def _result_box() -> gr.Textbox:
    return gr.Textbox(
        elem_id="k3-result",
        label="Result of a call",
        placeholder="What the tool answers, as text or JSON",
        lines=2,
        max_lines=8,
        submit_btn="Send result",
        visible=False,
    )


def _gallery() -> gr.Gallery:
    return gr.Gallery(
        elem_id="k3-seen",
        show_label=False,
        columns=2,
        height="auto",
        object_fit="contain",
        interactive=False,
        visible=False,
        format="png",
        buttons=["fullscreen"],
    )


def _drawer(defaults: ChatOptions) -> list[gr.components.Component]:
    """The settings; their order is that of :func:`read_settings`."""
    sampling = SamplingParams()
    return [
        gr.Checkbox(defaults.thinking, label="Think first", elem_id="k3-thinking", container=False),
        gr.Dropdown(
            [("as the model is set", ""), *((word, word) for word in _EFFORTS)],
            value=defaults.thinking_effort or "",
            label="Thinking effort",
        ),
        gr.Slider(0, 2, value=sampling.temperature, step=0.05, label="Temperature"),
        gr.Slider(0.05, 1, value=sampling.top_p, step=0.05, label="Top-p"),
        gr.Slider(1, _MAX_GENERATED, value=sampling.max_tokens, step=1, label="Max tokens"),
        gr.Textbox("", label="Seed", placeholder="drawn anew", max_lines=1),
        gr.Textbox(
            "",
            label="Tools (JSON)",
            placeholder='[{"type": "function", "function": {"name": ...}}]',
            lines=3,
            max_lines=12,
        ),
    ]


def read_settings(
    thinking: bool,
    effort: str,
    temperature: float,
    top_p: float,
    max_tokens: float,
    seed: str,
    tools: str,
) -> ChatSettings:
    """The drawer's values as a request has them.

    Raises:
        gr.Error: a field cannot be read; shown to the visitor.
    """
    try:
        number = int(seed) if seed.strip() else None
    except ValueError as exc:
        raise gr.Error(f"The seed must be a whole number, not {seed[:40]!r}.") from exc
    try:
        listed = json.loads(tools) if tools.strip() else []
        if not isinstance(listed, list):
            raise gr.Error("Tools must be a JSON list.")
        declared = parse_tools(listed)
    except json.JSONDecodeError as exc:
        raise gr.Error(f"Tools are not JSON: {exc.msg} in line {exc.lineno}.") from exc
    except TemplateError as exc:
        raise gr.Error(f"Tools cannot be used: {exc}.") from exc
    effort_word = effort if thinking and effort in _EFFORTS else None
    return ChatSettings(
        sampling=SamplingParams(
            max_tokens=max(1, min(int(max_tokens), _MAX_GENERATED)),
            temperature=float(temperature),
            top_p=float(top_p),
            seed=number,
        ),
        options=ChatOptions(thinking=bool(thinking), thinking_effort=effort_word),
        tools=declared,
    )


def _chosen(drawer: tuple[Any, ...]) -> ChatSettings | None:
    """The drawer's values; what is wrong with them is said, and the chat stays as it is."""
    try:
        return read_settings(*drawer)
    except gr.Error as exc:
        gr.Warning(exc.message, title="Settings")
        return None


# ---------------------------------------------------------------------- handlers


def _wire(
    page: gr.Blocks,
    sessions: Sessions,
    view: _View,
    settings: list[gr.components.Component],
) -> None:
    """Bind every action that asks the model, takes back or stops."""
    answering = [
        (view.box.submit, _sender(sessions), [view.box, *settings]),
        (view.chat.example_select, _example_sender(sessions), settings),
        (view.chat.retry, _retrier(sessions), settings),
        (view.chat.edit, _editor(sessions), settings),
        (view.result.submit, _giver(sessions), [view.result, *settings]),
    ]
    for bind, handler, inputs in answering:
        asked = bind(
            _never_silent(handler),
            inputs,
            list(view),
            concurrency_limit=_CONCURRENCY,
            concurrency_id="answers",
            show_progress="hidden",
            api_visibility="private",
        )
        _at_once(asked.then, _settler(sessions), [view.chat, view.box, view.result])
    _at_once(view.chat.undo, _undoer(sessions), list(view))
    _at_once(view.chat.clear, _clearer(sessions), list(view))
    _at_once(view.box.stop, _stopper(sessions), None)
    _at_once(view.chat.select, _selector(sessions), [view.seen, view.facts])

    async def forget(request: gr.Request) -> None:
        sessions.drop(_key(request))

    page.unload(forget)


def _never_silent(handler: _Answering) -> _Answering:
    """A handler that gives nothing would empty all that it writes to, the box included."""

    @functools.wraps(handler)
    async def answering(*args: Any) -> AsyncIterator[tuple[Any, ...]]:
        silent = True
        async for shown in handler(*args):
            silent = False
            yield shown
        if silent:
            yield tuple(gr.skip() for _ in _View._fields)

    return answering


def _at_once(bind: Callable[..., Any], handler: Callable[..., Any], outputs: Any) -> None:
    """Bind what needs no model: it does not wait in the queue behind answers."""
    bind(handler, None, outputs, queue=False, show_progress="hidden", api_visibility="private")


def _sender(sessions: Sessions) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    async def send(
        request: gr.Request, message: dict[str, Any] | None, *drawer: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        session, chosen = sessions.get(_key(request)), _chosen(drawer)
        if chosen is None or message is None:  # nothing is sent from a box that was never touched
            return
        paths = [Path(path) for path in message["files"]]
        async for shown in _show(session, session.send(message["text"], paths, chosen)):
            yield shown

    return send


def _example_sender(sessions: Sessions) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    async def send_example(
        request: gr.Request, data: gr.SelectData, *drawer: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        session, chosen = sessions.get(_key(request)), _chosen(drawer)
        if chosen is None:
            return
        example = examples_of(data)
        async for shown in _show(session, session.send(*example, chosen)):
            yield shown

    return send_example


def examples_of(data: gr.SelectData) -> tuple[str, list[Path]]:
    """Text and files of the example that was clicked."""
    return data.value["text"], [Path(file["path"]) for file in data.value.get("files", [])]


def _retrier(sessions: Sessions) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    async def retry(
        request: gr.Request, data: gr.RetryData, *drawer: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        session, chosen = sessions.get(_key(request)), _chosen(drawer)
        turn = _turn_of(session, data.index)
        if turn is not None and chosen is not None:
            async for shown in _show(session, session.retry(turn, chosen)):
                yield shown

    return retry


def _editor(sessions: Sessions) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    async def edit(
        request: gr.Request, data: gr.EditData, *drawer: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        session, chosen = sessions.get(_key(request)), _chosen(drawer)
        turn = _turn_of(session, data.index)
        if turn is not None and chosen is not None:
            async for shown in _show(session, session.edit(turn, str(data.value), chosen)):
                yield shown

    return edit


def _giver(sessions: Sessions) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    async def give(request: gr.Request, text: str, *drawer: Any) -> AsyncIterator[tuple[Any, ...]]:
        session, chosen = sessions.get(_key(request)), _chosen(drawer)
        if chosen is None:
            return
        if len(session.awaited) > 1:
            async for _ in session.give(text, chosen):
                yield _frame(session, result=_result_of(session))
            return
        async for shown in _show(session, session.give(text, chosen)):
            yield shown

    return give


def _selector(sessions: Sessions) -> Callable[..., Any]:
    async def select(request: gr.Request, data: gr.SelectData) -> tuple[Any, ...]:
        # A click on a row shows what the model saw of that turn; a turn without files, nothing.
        session = sessions.get(_key(request))
        turn = _turn_of(session, data.index)
        seen = () if turn is None else await session.look(turn)
        return (_gallery_of(seen), _facts_of(seen)) if seen else (gr.skip(), gr.skip())

    return select


def _undoer(sessions: Sessions) -> Callable[..., Any]:
    async def undo(request: gr.Request, data: gr.UndoData) -> tuple[Any, ...]:
        session = sessions.get(_key(request))
        turn = _turn_of(session, data.index)
        if turn is None:
            return _frame(session)
        text, paths = session.undo(turn)
        value = {"text": text, "files": [str(path) for path in paths]}
        return _frame(session, box=_idle_box(value=value), result=_result_of(session))

    return undo


def _clearer(sessions: Sessions) -> Callable[..., Any]:
    async def clear(request: gr.Request) -> tuple[Any, ...]:
        session = sessions.get(_key(request))
        session.clear()
        gallery = gr.Gallery(value=None, visible=False)
        hidden = gr.Textbox(visible=False)
        return [], _idle_box(value=None), figures_html(None), gallery, look.SEEN_EMPTY, hidden

    return clear


def _stopper(sessions: Sessions) -> Callable[..., Any]:
    async def stop(request: gr.Request) -> None:
        sessions.get(_key(request)).stop()

    return stop


def _settler(sessions: Sessions) -> Callable[..., Any]:
    async def settle(request: gr.Request) -> tuple[Any, ...]:
        # After an answer, however it ended: the last rows, and a box that takes questions.
        session = sessions.get(_key(request))
        if session.busy:
            return gr.skip(), gr.skip(), gr.skip()
        turns = session.turns
        refused = bool(turns) and not turns[-1].askable
        box = _idle_box(value={"text": turns[-1].text, "files": []}) if refused else _idle_box()
        return _chat_value(session), box, _result_of(session)

    return settle


# ---------------------------------------------------------------------- results


async def _show(session: Session, progress: AsyncIterator[None]) -> AsyncIterator[tuple[Any, ...]]:
    """Frames for as long as an answer is in the making."""
    box: Any = gr.MultimodalTextbox(value=None, submit_btn=False, stop_btn=True)
    result: Any = gr.Textbox(visible=False)
    async for _ in progress:
        yield _frame(session, box=box, result=result)
        box = result = gr.skip()


def _frame(session: Session, box: Any = None, result: Any = None) -> tuple[Any, ...]:
    """One result for all of the view; what did not change is skipped."""
    box, result = (gr.skip() if value is None else value for value in (box, result))
    seen = session.take_seen()
    gallery, facts = (_gallery_of(seen), _facts_of(seen)) if seen else (gr.skip(), gr.skip())
    figures = figures_html(session.figures)
    return _chat_value(session), box, figures, gallery, facts, result


def _result_of(session: Session) -> gr.Textbox:
    """The field for what the first awaited call brought; hidden where none is awaited."""
    awaited = session.awaited
    if not awaited:
        return gr.Textbox(visible=False)
    more = f", {len(awaited) - 1} more to come" if len(awaited) > 1 else ""
    return gr.Textbox(value="", label=f"Result of {awaited[0].name}{more}", visible=True)


def _chat_value(session: Session) -> list[dict[str, Any]]:
    return [row.value for row in chat_rows(session.turns)]


def _gallery_of(seen: tuple[Seen, ...]) -> gr.Gallery:
    pictures = [picture for each in seen for picture in each.pictures]
    return gr.Gallery(value=pictures, visible=True, columns=min(len(pictures), 2))


def _facts_of(seen: tuple[Seen, ...]) -> str:
    return "".join(each.facts for each in seen)


def _idle_box(**changes: Any) -> gr.MultimodalTextbox:
    return gr.MultimodalTextbox(submit_btn=True, stop_btn=False, **changes)


def _turn_of(session: Session, index: int | tuple[int, int]) -> int | None:
    """The turn that a row of the chat belongs to; None for a row that is no longer there."""
    row = index[0] if isinstance(index, tuple | list) else index
    rows = chat_rows(session.turns)
    return rows[row].turn if 0 <= row < len(rows) else None


def _key(request: gr.Request) -> str:
    """The browser tab's key."""
    assert request.session_hash is not None, "Gradio gives every tab a key"
    return str(request.session_hash)
