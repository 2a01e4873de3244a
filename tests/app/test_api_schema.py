"""The OpenAPI document holds: whatever fits it or nearly fits it, nothing answers with 500."""

from __future__ import annotations

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from k3vl.app.openapi import document
from tests.app.serving import fake_pipeline, in_thread
from tests.fakes import FakeBackend

SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = [
    (path, method, mode)
    for path, methods in document()["paths"].items()
    for method in methods
    for mode in ("POSITIVE", "NEGATIVE")
    if mode == "POSITIVE" or method == "post"  # without a body there is nothing to get wrong
]


@pytest.fixture(scope="module")
def url():
    backend = FakeBackend([])
    pipeline = fake_pipeline(backend)
    backend.answer = [
        *pipeline.tokenizer.encode_segment("yes", False),
        pipeline.tokenizer.stop_ids[0],
    ]
    with in_thread(pipeline, media_workers=1) as (address, _):
        yield address


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_no_request_breaks_the_server(url: str, path: str, method: str, mode: str) -> None:
    kind = schemathesis.GenerationMode[mode]
    operation = SCHEMA[path][method.upper()]
    cases = operation.as_strategy(generation_mode=kind)

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case) -> None:
        case.call_and_validate(
            base_url=url, timeout=60, checks=[schemathesis.checks.not_a_server_error]
        )

    check()


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    content=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "text", "image_url", "url", "detail", "role", "x"]),
                inner | st.sampled_from(["text", "image_url", "data:image/png;base64,AAAA"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    role=st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]),
)
def test_no_message_breaks_the_server(url: str, content, role) -> None:
    extra = {"tool_calls": content, "tools": content, "tool_call_id": content, "name": content}
    for more in ({}, extra):
        body = {"model": "demo", "messages": [{"role": role, "content": content, **more}]}
        reply = httpx2.post(url + "/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
