"""Every name of SGLang that the plugin touches; one that moves fails here, with a sentence."""

from __future__ import annotations

import inspect
from argparse import Namespace
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

import pytest

from k3vl.sglang.plugin import PACKAGES
from k3vl.sglang.releases import SUPPORTED
from k3vl.types import ChatOptions

NAMES = {
    "sglang.srt.environ:envs.SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "names our processors",
    "sglang.srt.managers.multimodal_processor:import_processors": "imports our processors",
    "sglang.srt.environ:envs.SGLANG_EXTERNAL_MODEL_PACKAGE": "names our model",
    "sglang.srt.models.registry:import_model_classes": "imports our model",
    "sglang.srt.plugins:load_plugins": "calls our entry point",
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:_BUILDERS": "takes our chat encoder",
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:ChatEncodingAdapter.encode_messages": (
        "is what our chat encoder implements"
    ),
    **{
        f"sglang.srt.entrypoints.openai.chat_encoding_adapters:{name}": why
        for name, why in {
            "ChatEncodingOutputAdapter": "is what our reader of answers implements",
            "ResponsesOutputStream": "is what it implements for /v1/responses",
            "ChatOutputHooks": "is what it asks for ids of tool calls",
            "select_new_output_ids": "tells it what is new in a chunk",
            "token_output_sse_chunks": "frames what it says",
        }.items()
    },
    "sglang.srt.entrypoints.openai.protocol:ToolCall": "is a tool call of a reply",
    "sglang.srt.entrypoints.openai.protocol:FunctionResponse": "is its name and arguments",
    "sglang.srt.function_call.core_types:ToolCallItem": "is the same for /v1/responses",
    "sglang.srt.runtime_context:get_serving": "holds incremental_streaming_output",
    "sglang.srt.entrypoints.openai.chat_encoding:resolve_chat_encoding_spec": (
        "says that K3's chats are encoded by 'kimi_k3'"
    ),
    "sglang.srt.runtime_context:get_mm": "holds mm_process_config and allowed_media_domains",
    "sglang.srt.runtime_context:get_model": "holds model_path and revision",
    "sglang.srt.runtime_context:get_disagg": "holds language_only",
    "sglang.srt.managers.schedule_batch:Modality.IMAGE": "is the modality of our items",
    "sglang.srt.managers.schedule_batch:MultimodalDataItem.set_identity": "takes our digests",
    "sglang.srt.managers.schedule_batch:MultimodalProcessorOutput": "is what our processor returns",
    "sglang.srt.models.kimi_k3:KimiK3ForConditionalGeneration": "is the model of our processor",
    "sglang.srt.models.kimi_k3:KimiK3ForConditionalGeneration.precompile_kernels_after_loading": (
        "is called when weights are loaded, and what our model overrides"
    ),
    "sglang.srt.models.kimi_k3:KimiK3ForConditionalGeneration.get_image_feature": (
        "encodes pictures and clips, and what our model overrides"
    ),
    "sglang.srt.multimodal.processors.kimi_k3:DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY": (
        "leaves an item in the pool until it is encoded"
    ),
    "sglang.srt.multimodal.transport.cuda_ipc:MmItemMemoryPool.cancel_proxy": (
        "frees an item's place in the pool"
    ),
    "sglang.srt.utils:ImageData": "carries pictures of chats",
    "sglang.srt.utils:VideoData": "carries clips of chats",
    **{
        f"sglang.srt.multimodal.processors.kimi_k3:KimiK3ImageProcessor.{name}": why
        for name, why in {
            "process_mm_data_async": "is what our processor overrides",
            "shutdown": "is what our processor overrides",
            "reject_caller_image_identity": "keeps forged identities out",
            "_is_preprocessed_input": "tells precomputed inputs",
            "prepare_media_artifacts": "prepares pictures in parity",
            "compose_request": "frames pictures in parity",
            "_process_mm_data_uncached": "does both where the cache is off",
            "_prepare_mm_items_for_transport": "hands items to the scheduler",
        }.items()
    },
}
PARAMETERS = {
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:select_new_output_ids": {
        "output_ids",
        "num_consumed_tokens",
        "completion_tokens",
        "finish_reason_type",
        "incremental",
    },
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:token_output_sse_chunks": {
        *("chunk_id", "created", "model", "index", "usage", "logprobs"),
        *("reasoning", "content", "tool_calls"),
    },
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:ChatEncodingAdapter.encode_messages": {
        "messages",
        "request",
        "tools",
        "thinking",
        "image_data",
    },
    "sglang.srt.multimodal.processors.kimi_k3:KimiK3ImageProcessor.process_mm_data_async": {
        "image_data",
        "input_text",
        "request_obj",
    },
    "sglang.srt.multimodal.processors.kimi_k3:KimiK3ImageProcessor.prepare_media_artifacts": {
        "media_data",
        "content_hashes",
    },
}
FIELDS = {
    "sglang.srt.managers.schedule_batch:MultimodalDataItem": {
        "modality",
        "feature",
        "offsets",
        "model_specific_data",
    },
    "sglang.srt.managers.schedule_batch:MultimodalProcessorOutput": {
        "input_ids",
        "mm_items",
        "im_token_id",
    },
    "sglang.srt.utils:ImageData": {"url", "detail", "preprocess_kwargs", "max_long_side_pixel"},
    "sglang.srt.utils:VideoData": {"url", "preprocess_kwargs", "max_long_side_pixel"},
    "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest": {
        "messages",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "reasoning_effort",
        "response_format",
        "continue_final_message",
        *("stop", "no_stop_trim", "separate_reasoning", "stream_reasoning"),
    },
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:ChatOutputHooks": {
        "history_tool_calls_count",
        "tool_call_id",
    },
    "sglang.srt.entrypoints.openai.chat_encoding_adapters:ChatEncodingAdapterContext": {
        "reasoning_parser",
        "tool_call_parser",
        "chat_hooks",
    },
}


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_the_plugin_looks_for_it(name: str) -> None:
    try:
        resolve(name)
    except (ImportError, AttributeError) as exc:
        pytest.fail(f"SGLang {version('sglang')} has no {name}, which {NAMES[name]}: {exc}")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_function_takes_what_the_plugin_gives_it(name: str) -> None:
    missing = PARAMETERS[name] - inspect.signature(resolve(name)).parameters.keys()
    assert not missing, f"{name} of SGLang {version('sglang')} takes no {sorted(missing)}"


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_has_the_fields_that_the_plugin_reads(name: str) -> None:
    missing = FIELDS[name] - set(inspect.get_annotations(resolve(name)))
    assert not missing, f"{name} of SGLang {version('sglang')} has no {sorted(missing)}"


def members(protocol: Any) -> set[str]:
    names = set(vars(protocol)) | set(inspect.get_annotations(protocol))
    return {name for name in names if not name.startswith("_")}


def test_our_classes_have_every_member_of_the_protocols() -> None:
    from sglang.srt.entrypoints.openai import chat_encoding_adapters as theirs

    from k3vl.sglang.answers import K3AnswerAdapter, ResponsesStream
    from k3vl.sglang.chat import K3ChatAdapter

    adapter = K3ChatAdapter(None, ChatOptions(), takes_clips=True)  # type: ignore[arg-type]
    assert members(theirs.ChatEncodingAdapter) <= set(dir(adapter))
    for protocol, ours in (
        (theirs.ChatEncodingOutputAdapter, K3AnswerAdapter),
        (theirs.ResponsesOutputStream, ResponsesStream),
    ):
        for name in members(protocol):
            wanted = inspect.signature(getattr(protocol, name)).parameters
            assert inspect.signature(getattr(ours, name)).parameters.keys() == wanted.keys(), name


def test_the_release_is_one_that_we_name() -> None:
    assert version("sglang") in SUPPORTED


def test_sglang_finds_the_plugin() -> None:
    entries = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "k3vl"]
    assert [entry.value for entry in entries] == ["k3vl.sglang.plugin:register"]


@pytest.mark.parametrize("variable", PACKAGES)
def test_a_variable_is_still_read(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    monkeypatch.setenv(variable, "some.package")
    assert getattr(envs, variable).get() == "some.package"


def test_the_benchmark_of_slices_names_arguments_that_exist() -> None:
    from sglang.srt.server_args import ServerArgs

    from benchmarks.sglang_slice import arguments

    flags = Namespace(model="some/model", memory=0.8, prefill=[1024], decode=[1], context=512)
    assert arguments(flags).keys() <= inspect.signature(ServerArgs).parameters.keys()
