"""The evaluation with a stand-in for the model: what is measured here is the measuring."""

from dataclasses import dataclass, field

from k3vl.demo.evaluate import Evaluator, suites, table_row
from k3vl.errors import MediaError
from k3vl.pipeline import Reply
from k3vl.types import MediaPart, Request, TextPart, Usage
from k3vl.vision.processor import MediaProcessor


@dataclass
class OnePhrase:
    """Decodes every file for real and always says the same."""

    phrase: str
    processor: MediaProcessor
    kinds: list[str] = field(default_factory=list)

    def request(self, messages, *, options=None, sampling=None):
        del options, sampling
        return Request(messages=tuple(messages))

    def replies(self, requests):
        for number, request in enumerate(requests):
            media, text = request.messages[0].parts
            assert isinstance(media, MediaPart)
            assert isinstance(text, TextPart)
            self.kinds.append(self.processor.process(media).layout.kind)
            if number == 0:
                yield MediaError("lost")
            else:
                yield Reply(
                    content=self.phrase, reasoning="", tool_calls=(), finish="stop", usage=Usage()
                )


def _run(atlas, tmp_path, task, phrase, media_config, items=12):
    pipeline = OnePhrase(phrase, MediaProcessor(media_config))
    suite = next(s for s in suites(atlas) if s.task == task)
    result = Evaluator(pipeline, atlas, tmp_path, items).run(suite, 1)
    return pipeline, suite, result


def test_all_suites_can_be_made(atlas):
    names = [suite.name for suite in suites(atlas)]
    assert len(set(names)) == len(names)
    assert any("openmoji" in name for name in names)


def test_failed_requests_are_wrong_answers(atlas, tmp_path):
    from k3vl.config import load_media_config
    from k3vl.demo.pack import CHECKPOINT

    media = load_media_config(CHECKPOINT)
    pipeline, suite, result = _run(atlas, tmp_path, "yesno", "Yes.", media)
    assert result["exact"]["n"] == 12
    assert 0 < result["exact"]["share"] < 1
    assert pipeline.kinds == ["image"] * 24, "the files and their grey twins"
    assert "blank" in table_row(suite.name, result)


def test_clips_go_through_as_clips(atlas, tmp_path):
    from k3vl.config import load_media_config
    from k3vl.demo.pack import CHECKPOINT

    media = load_media_config(CHECKPOINT)
    pipeline, _, result = _run(atlas, tmp_path, "video", "A kite moves up.", media, items=3)
    assert set(pipeline.kinds) == {"video"}
    assert result["exact"]["n"] == 3
