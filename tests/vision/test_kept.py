"""A picture that comes again is not processed again; nothing else is taken for it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.kept import KeptMedia
from k3vl.vision.processor import MediaProcessor

SIZE = 28 * 28 * 3


def png(image: Image.Image) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def flat(level: int, size: tuple[int, int] = (28, 28)) -> bytes:
    return png(Image.new("RGB", size, (level, 0, 0)))


def processor(keep_bytes: int = 2**20) -> MediaProcessor:
    return MediaProcessor(K3_MEDIA, keep_bytes=keep_bytes)


def test_the_same_file_is_processed_once(tmp_path) -> None:
    mine, path = processor(), tmp_path / "a.png"
    path.write_bytes(flat(1))
    first = mine.process(flat(1))
    assert mine.process(MediaPart("image", flat(1))) is first
    assert mine.process(path, "image") is first
    path.write_bytes(flat(2))
    assert mine.process(path, "image").items[0].digest != first.items[0].digest
    assert processor(0).process(flat(1)) is not first
    np.testing.assert_array_equal(
        processor(0).process(flat(1)).items[0].patches, first.items[0].patches
    )


def test_detail_is_part_of_the_key() -> None:
    mine, data = processor(2**24), flat(1, (1400, 1400))
    sizes = [
        mine.process(MediaPart("image", data, detail=detail)).items[0].num_tokens
        for detail in ("low", "high", "low")
    ]
    assert sizes[0] == sizes[2] < sizes[1]


def test_equal_bytes_of_another_size_or_palette_are_another_picture() -> None:
    """28 x 56 and 56 x 28 of one colour, and one index plane under two palettes."""
    mine = processor()
    sizes = [mine.process(flat(7, size)).items[0].digest for size in ((28, 56), (56, 28))]
    assert sizes[0] != sizes[1]
    digests = []
    for colour in (10, 200):
        indexed = Image.fromarray(np.zeros((28, 28), np.uint8), "P")
        indexed.putpalette([colour, 0, 0] * 256)
        digests.append(mine.process(png(indexed)).items[0].digest)
    assert digests[0] != digests[1]


def test_the_oldest_goes_first_and_what_is_too_large_is_not_kept() -> None:
    mine = processor(2 * SIZE)
    a = mine.process(flat(1))
    b = mine.process(flat(2))
    assert mine.process(flat(1)) is a
    mine.process(flat(3))
    assert mine.process(flat(1)) is a
    assert mine.process(flat(2)) is not b
    large = flat(9, (56, 56))
    assert mine.process(large) is not mine.process(large)


def test_a_picture_that_is_being_made_is_waited_for() -> None:
    mine, started, go = processor(), threading.Event(), threading.Event()
    calls, inner = [], mine._process_image

    def slow(source, detail):
        calls.append(1)
        started.set()
        assert go.wait(10)
        return inner(source, detail)

    mine._process_image = slow
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(mine.process(flat(1)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 4
    assert len({id(media) for media in found}) == 1


def test_a_failure_is_not_kept() -> None:
    mine = processor()
    for _ in range(2):
        with pytest.raises(MediaError):
            mine.process(b"no picture at all")
    assert mine.process(flat(1)).layout.width == 28


def test_who_waited_for_a_failure_tries_for_itself() -> None:
    """The other one's end may have been its own: an interrupt, say."""
    kept, started, go = KeptMedia(2**20), threading.Event(), threading.Event()

    def interrupted():
        started.set()
        assert go.wait(10)
        raise KeyboardInterrupt

    made = processor().process(flat(1))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.get, "a", interrupted)
        assert started.wait(10)
        second = pool.submit(kept.get, "a", lambda: made)
        go.set()
        assert isinstance(first.exception(10), KeyboardInterrupt)
        assert second.result(10) is made
