"""Clips: clocks, rotation, aspect, damage, animated pictures, budgets."""

import dataclasses
import io
import random
import time
from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from k3vl.config import K3_MEDIA, K25_MEDIA
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.limits import MediaLimits
from k3vl.vision.plan import plan_frame, sample_frames
from k3vl.vision.processor import MediaProcessor, model_view
from k3vl.vision.timeline import Timeline, repair_times
from tests.timing import cpu_limit
from tests.vision.files import corners, encode, level, noise, solid_frames, video

PROCESSOR = MediaProcessor(K3_MEDIA)
MILLI = Fraction(1, 1000)


def code(data, processor=PROCESSOR):
    with pytest.raises(MediaError) as info:
        processor.process(data, "video")
    assert "0x" not in str(info.value)
    return info.value.code


def levels(media):
    return [level(picture) for picture in model_view(media)]


def numbers(media):
    """Which of ``solid_frames`` each frame is."""
    return [round((value - 10) / 10) for value in levels(media)]


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 24])
@pytest.mark.parametrize("rate", [5, 8, 12, 24])
@pytest.mark.parametrize("config", [K3_MEDIA, K25_MEDIA], ids=["k3", "k25"])
def test_constant_rate_files_give_the_released_indices(config, rate, count):
    media = MediaProcessor(config).process(video(solid_frames(count), rate=rate), "video")
    expected = sample_frames(count, rate, config.sample_fps)
    assert numbers(media) == list(expected)
    assert media.frame_times == tuple(index / rate for index in expected)
    assert [item.grid_thw[0] for item in media.items][:-1] == [4] * (len(media.items) - 1)
    assert len(media.layout.groups) == len(media.items) == -(-len(expected) // 4)
    assert media.layout.groups[0].timestamp == "00:00:00.000"
    assert media.warnings == ()


def test_layout_tokens_and_timestamps_of_a_clip():
    media = PROCESSOR.process(MediaPart("video", video(solid_frames(24, 70, 50), rate=8)))
    plan = plan_frame(70, 50, K3_MEDIA)
    assert (media.layout.kind, media.layout.width, media.layout.height) == ("video", 70, 50)
    assert [g.timestamp for g in media.layout.groups] == [
        f"00:00:0{i // 2}.{i % 2 * 5}00" for i in range(6)
    ]
    for group, item in zip(media.layout.groups, media.items, strict=True):
        assert group.num_tokens == item.num_tokens == plan.num_tokens
        assert item.grid_thw == (4, *plan.grid_thw[1:])
        assert item.patches.shape == (4 * plan.grid_thw[1] * plan.grid_thw[2], 3, 14, 14)
        assert item.patches.dtype == np.uint8


@pytest.mark.parametrize(
    ("count", "rate"), [(1, 30), (9, 30), (2, 1000)], ids=["one frame", "0.3 s", "2 ms"]
)
def test_very_short_clips_give_at_least_one_frame(count, rate):  # R36, V19, V20, V22
    media = PROCESSOR.process(video(solid_frames(count), rate=rate), "video")
    assert len(media.frame_times) == max(round(count * 8 / rate), 1)
    assert media.items[0].num_tokens == 6


def test_29_97_frames_a_second_survive_the_milliseconds_of_matroska():
    media = PROCESSOR.process(
        video(solid_frames(24), fmt="matroska", rate=Fraction(30000, 1001)), "video"
    )
    fps = 30000 / 1001
    assert media.frame_times == tuple(i / fps for i in sample_frames(24, fps, 8.0))


def variable(times, **options):
    return video(
        solid_frames(len(times)), times=times, time_base=MILLI, rate=1000, fmt="matroska", **options
    )


def test_variable_rate_is_sampled_and_stamped_by_presentation_time():  # V4, V5
    # 10 frames in the first 100 ms, then one each half second.
    times = [*range(0, 100, 10), 500, 1000, 1500, 2000]
    media = PROCESSOR.process(variable(times), "video")
    assert media.frame_times == (0.0, 0.09, 0.5, 1.0, 1.5, 2.0)
    assert numbers(media) == [0, 9, 10, 11, 12, 13]
    assert [g.timestamp for g in media.layout.groups] == ["00:00:00.000", "00:00:01.500"]


def test_slide_show_keeps_every_slide():  # V12
    media = PROCESSOR.process(variable([0, 4000, 9000, 9500]), "video")
    assert media.frame_times == (0.0, 4.0, 9.0, 9.5)


def test_clips_that_start_late_start_at_zero():
    data = video(solid_frames(16), fmt="mpegts", rate=8)
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].start_time > 0
    media = PROCESSOR.process(data, "video")
    assert media.frame_times == tuple(i / 8 for i in range(16))


@pytest.mark.parametrize(
    ("fmt", "codec", "pix_fmt"),
    [
        ("mp4", "mpeg4", "yuv420p"),
        ("mov", "libx264", "yuv420p"),
        ("matroska", "libx264", "yuv420p"),
        ("webm", "libvpx", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("avi", "mpeg4", "yuv420p"),
        ("flv", "flv", "yuv420p"),
        ("asf", "wmv2", "yuv420p"),
        ("mpegts", "mpeg2video", "yuv420p"),
        ("mpeg", "mpeg2video", "yuv420p"),
        ("ogg", "libtheora", "yuv420p"),
        ("h264", "libx264", "yuv420p"),
        ("ivf", "libvpx", "yuv420p"),
        ("mp4", "libx265", "yuv420p10le"),
        ("mp4", "libsvtav1", "yuv420p10le"),
        ("mov", "prores_ks", "yuv422p10le"),
        ("mov", "mjpeg", "yuvj420p"),
        ("mov", "qtrle", "rgb24"),
    ],
)
def test_containers_codecs_and_pixel_formats(fmt, codec, pix_fmt):  # V11, V13, V15, V16, V25, V26
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    width, height = (176, 144) if codec in ("libx265", "libsvtav1") else (64, 48)
    data = video(
        solid_frames(24, width, height), fmt=fmt, codec=codec, pix_fmt=pix_fmt, rate=24,
        options={"bf": "0"} if codec in ("mpeg4", "mpeg2video") else {},
    )  # fmt: skip
    media = PROCESSOR.process(data, "video")
    assert (media.layout.width, media.layout.height) == (width, height)
    expected = sample_frames(24, 24, 8.0)
    assert len(media.frame_times) == len(expected)
    if fmt == "mpeg":  # FFmpeg's writer leaves a gap in this one's clock
        return
    assert np.allclose(media.frame_times, [i / 24 for i in expected], atol=0.05)
    assert np.allclose(levels(media), [10 + 10 * i for i in expected], atol=6)


def test_recorder_webm_without_duration_or_frame_count():  # V13, V16
    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            self.data += data
            return len(data)

    pipe = Pipe()
    with av.open(pipe, "w", format="webm", options={"live": "1"}) as container:
        stream = container.add_stream("libvpx-vp9", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for pixels in solid_frames(12):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with av.open(io.BytesIO(bytes(pipe.data))) as container:
        assert container.duration is None
        assert container.streams.video[0].frames == 0
    media = PROCESSOR.process(bytes(pipe.data), "video")
    assert numbers(media) == list(range(12))


# ---------------------------------------------------------------------- upright


def rotated(degrees, **flips):
    pixels = [np.asarray(corners(96, 64))] * 3
    return video(pixels, setup=lambda stream: stream.set_display_rotation(degrees, **flips))


@pytest.mark.parametrize(
    ("degrees", "flips", "expected"),
    [
        (0, {}, None),
        (90, {}, Image.Transpose.ROTATE_90),
        (-90, {}, Image.Transpose.ROTATE_270),
        (180, {}, Image.Transpose.ROTATE_180),
        (0, {"hflip": True}, Image.Transpose.FLIP_LEFT_RIGHT),
        (0, {"vflip": True}, Image.Transpose.FLIP_TOP_BOTTOM),
    ],
)
def test_display_matrix_is_applied_before_the_size(degrees, flips, expected):  # R32, V1-V3
    media = PROCESSOR.process(rotated(degrees, **flips), "video")
    upright = corners(96, 64)
    if expected is not None:
        upright = upright.transpose(expected)
    assert (media.layout.width, media.layout.height) == upright.size
    view = model_view(media)[0].crop((0, 0, *upright.size))
    difference = np.abs(np.asarray(view).astype(int) - np.asarray(upright))
    assert np.median(difference) < 8
    assert difference.mean() < 12


@pytest.mark.parametrize("degrees", [90, -90])
def test_rotation_with_a_flip_swaps_the_sides_too(degrees):
    media = PROCESSOR.process(rotated(degrees, hflip=True), "video")
    assert (media.layout.width, media.layout.height) == (64, 96)


def test_odd_angles_are_left_and_said():
    media = PROCESSOR.process(rotated(45), "video")
    assert (media.layout.width, media.layout.height) == (96, 64)
    assert "no quarter turn" in media.warnings[0]


@pytest.mark.parametrize(
    ("aspect", "size"),
    [(Fraction(64, 45), (1024, 576)), (Fraction(16, 15), (768, 576)), (Fraction(1, 2), (360, 576))],
)
def test_sample_aspect_ratio_gives_the_display_size(aspect, size):  # V30
    def setup(stream):
        stream.codec_context.sample_aspect_ratio = aspect

    media = PROCESSOR.process(video(solid_frames(1, 720, 576), setup=setup), "video")
    assert (media.layout.width, media.layout.height) == size
    view = model_view(media)[0]
    assert abs(level(view, size[0] - 2, size[1] - 2) - 10) < 4
    assert size[0] % 28 == 0 or level(view, size[0] + 1, 5) == 0


@pytest.mark.parametrize("size", [(63, 47), (65, 49), (37, 50)])
def test_odd_sizes_have_no_edge(size):  # V28, V29
    pixels = [np.full((size[1], size[0], 3), (200, 60, 60), np.uint8)] * 2
    data = video(pixels, codec="libvpx-vp9", fmt="webm", options={"crf": "4", "b": "0"})
    media = PROCESSOR.process(data, "video")
    assert (media.layout.width, media.layout.height) == size
    view = np.asarray(model_view(media)[0])[: size[1], : size[0]].astype(int)
    assert np.abs(view - view[5, 5]).max() < 12


def test_full_range_and_limited_range_look_the_same():  # V24
    def full(stream):
        stream.codec_context.color_range = 2

    pixels = [np.full((48, 64, 3), (220, 120, 30), np.uint8)] * 2
    limited = PROCESSOR.process(video(pixels, options={"crf": "1"}), "video")
    whole = PROCESSOR.process(
        video(pixels, pix_fmt="yuvj420p", codec="mjpeg", fmt="mov", setup=full), "video"
    )
    a, b = (model_view(m)[0].getpixel((20, 20)) for m in (limited, whole))
    assert np.allclose(a, b, atol=10)
    assert np.allclose(a, (220, 120, 30), atol=10)


def test_hdr_is_said():  # V23
    def hlg(stream):
        stream.codec_context.color_trc = 18
        stream.codec_context.colorspace = 9
        stream.codec_context.color_primaries = 9

    data = video(solid_frames(2, 176, 144), codec="libx265", pix_fmt="yuv420p10le", setup=hlg)
    media = PROCESSOR.process(data, "video")
    assert "HDR (HLG) shown without tone mapping" in media.warnings


def test_alpha_plane_of_vp9_is_dropped():  # V27
    data = video(solid_frames(4), fmt="webm", codec="libvpx-vp9", pix_fmt="yuva420p")
    assert PROCESSOR.process(data, "video").layout.width == 64


# ---------------------------------------------------------------------- streams


def with_streams(build, fmt="mp4"):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt) as container:
        build(container)
    return buffer.getvalue()


def add_video(container, frames, **options):
    stream = container.add_stream("libx264", rate=8)
    stream.height, stream.width = frames[0].shape[:2]
    stream.pix_fmt = "yuv420p"
    return stream, [av.VideoFrame.from_ndarray(f, format="rgb24") for f in frames]


def add_audio(container):
    stream = container.add_stream("aac", rate=8000)
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
    frame.sample_rate = 8000
    return stream, [frame]


def test_audio_is_ignored():
    def build(container):
        pairs = [add_audio(container), add_video(container, solid_frames(8))]
        for stream, frames in pairs:
            for frame in frames:
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    assert numbers(PROCESSOR.process(with_streams(build), "video")) == list(range(8))


def test_audio_without_pictures_has_no_video_stream():  # V32, V34
    def build(container):
        stream, frames = add_audio(container)
        container.mux(stream.encode(frames[0]))
        container.mux(stream.encode())

    assert code(with_streams(build)) == "no_video_stream"
    assert code(b"ID3\x04\0\0\0\0\0\0" + b"\0" * 100) == "no_video_stream"
    assert code(b"RIFF\0\0\0\0WAVEfmt ") == "no_video_stream"


def cover_file(*, with_clip):
    """An MP4 whose first video stream is a cover picture."""

    def build(container):
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 320, 240, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        pairs = [add_video(container, solid_frames(8))] if with_clip else [add_audio(container)]
        picture = av.VideoFrame.from_ndarray(np.zeros((240, 320, 3), np.uint8), format="rgb24")
        container.mux(cover.encode(picture))
        container.mux(cover.encode())
        for stream, frames in pairs:
            for frame in frames:
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    return with_streams(build)


def test_cover_art_is_no_video():  # V32, V33
    with av.open(io.BytesIO(cover_file(with_clip=True))) as container:
        assert len(container.streams.video) == 2
    media = PROCESSOR.process(cover_file(with_clip=True), "video")
    assert (media.layout.width, len(media.frame_times)) == (64, 8)
    assert code(cover_file(with_clip=False)) == "no_video_stream"


# ---------------------------------------------------------------------- damage


def detailed_frames(count):
    generator = np.random.default_rng(5)
    base = generator.integers(0, 255, (96, 128, 3), np.uint8)
    return [np.roll(base, 3 * i, axis=1) for i in range(count)]


def packet_positions(data):
    with av.open(io.BytesIO(data)) as container:
        return [(p.pos, p.size) for p in container.demux(video=0) if p.size]


def damaged(data, packets):
    broken = bytearray(data)
    for position, size in packets:
        broken[position : position + size] = bytes(size)
    return bytes(broken)


def intra_clip(count=24):
    """Every packet is a whole JPEG, so damage stays where it is."""
    return video(detailed_frames(count), codec="mjpeg", pix_fmt="yuvj420p", fmt="mov", rate=8)


def test_broken_frames_in_the_middle_are_replaced_and_counted():  # V17
    data = intra_clip()
    media = PROCESSOR.process(damaged(data, packet_positions(data)[8:11]), "video")
    assert len(media.frame_times) == 21
    assert media.frame_times[:8] == tuple(i / 8 for i in range(8))
    assert media.frame_times[-1] == 23 / 8
    assert media.warnings == (
        "3 damaged packets left out",
        "3 of 24 chosen frames could not be decoded, the nearest good ones were used",
    )


def test_nearest_good_frame_stands_in_for_a_broken_one():  # V17
    data = intra_clip()
    config = dataclasses.replace(K3_MEDIA, sample_fps=2.0)
    chosen = sample_frames(24, 8, 2.0)
    media = MediaProcessor(config).process(
        damaged(data, [packet_positions(data)[chosen[2]]]), "video"
    )
    assert len(media.frame_times) == len(chosen)
    assert media.frame_times[2] in ((chosen[2] - 1) / 8, (chosen[2] + 1) / 8)


def test_broken_tail_gives_what_decodes():  # V14, V18
    data = intra_clip()
    media = PROCESSOR.process(damaged(data, packet_positions(data)[16:]), "video")
    assert media.frame_times == tuple(i / 8 for i in range(16))
    assert "8 damaged packets left out" in media.warnings


def test_broken_first_frame():  # V10
    data = intra_clip()
    media = PROCESSOR.process(damaged(data, packet_positions(data)[:2]), "video")
    assert media.frame_times == tuple(i / 8 for i in range(22))
    assert media.warnings == ("2 damaged packets left out",)


def test_interframe_damage_is_repeatable():
    data = video(detailed_frames(24), rate=8, options={"bf": "2", "crf": "10"})
    broken = damaged(data, [(p + s // 2, s // 2) for p, s in packet_positions(data)[6:9]])
    runs = [PROCESSOR.process(broken, "video") for _ in range(3)]
    assert len({tuple(item.digest for item in media.items) for media in runs}) == 1
    assert len(runs[0].frame_times) >= 6


@pytest.mark.parametrize("fmt", ["matroska", "mpegts", "flv", "avi"])
def test_cut_files_give_their_beginning(fmt):  # V14, V18
    codec = "mjpeg" if fmt in ("avi", "matroska") else "libx264" if fmt == "mpegts" else "flv"
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    intra = {"g": "1"}
    data = video(detailed_frames(24), fmt=fmt, rate=8, codec=codec, pix_fmt=pix_fmt, options=intra)
    media = PROCESSOR.process(data[: len(data) // 2], "video")
    assert 4 <= len(media.frame_times) <= 16


def test_transport_stream_joined_late_starts_at_the_first_whole_frame():  # V8-V10
    data = video(detailed_frames(24), fmt="mpegts", rate=8, options={"g": "8"})
    start = len(data) // 4 // 188 * 188
    media = PROCESSOR.process(data[start:], "video")
    assert media.frame_times[0] == 0.0
    assert 8 <= len(media.frame_times) < 24


def test_transport_stream_joined_inside_a_packet():  # V10
    data = video(detailed_frames(24), fmt="mpegts", rate=8, options={"g": "8"})
    media = PROCESSOR.process(data[len(data) // 4 // 188 * 188 + 77 :], "video")
    assert 8 <= len(media.frame_times) < 24


def test_mp4_without_its_index_is_refused():
    data = video(solid_frames(8))
    assert code(data[: data.index(b"moov") - 4]) == "video_corrupt"


def test_nothing_that_decodes_is_refused():
    data = intra_clip(4)
    assert code(damaged(data, packet_positions(data))) == "video_corrupt"


@pytest.mark.filterwarnings("ignore")
def test_random_damage_never_escapes_as_another_error():
    generator = random.Random(11)
    files = [
        video(detailed_frames(6), fmt=f, codec=c)
        for f, c in (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("flv", "flv"))
    ]
    outcomes = set()
    for number in range(120):
        data = bytearray(files[number % len(files)])
        for _ in range(generator.randint(1, 20)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            media = PROCESSOR.process(bytes(data), "video")
        except MediaError as exc:
            outcomes.add(exc.code)
        else:
            assert len(media.frame_times) >= 1
            outcomes.add("used")
    assert "used" in outcomes


# ---------------------------------------------------------------------- clocks


@given(st.lists(st.one_of(st.none(), st.floats(-2, 50)), min_size=1, max_size=40))
def test_repaired_clocks_increase_strictly(times):  # V6
    repaired, count = repair_times(times, 25.0)
    assert len(repaired) == len(times)
    assert all(b > a for a, b in pairwise(repaired))
    if all(t is not None for t in times) and all(b > a for a, b in pairwise(times)):
        assert (repaired, count) == (tuple(times), 0)
    elif None in times or len(set(times)) < len(times):
        assert count > 0


def test_repair_spreads_bursts_between_good_neighbours():  # V6
    times, count = repair_times([0.0, 1.0, 1.0, 1.0, 4.0, 5.0], 1.0)
    assert (times, count) == ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), 2)
    times, count = repair_times([0.0] * 5, 10.0)
    assert (times, count) == ((0.0, 0.1, 0.2, 0.3, 0.4), 4)
    times, _ = repair_times([None, 1.0, 2.0, None], 1.0)
    assert times == (0.0, 1.0, 2.0, 3.0)


def test_shuffled_clock_is_sorted_but_a_restarted_one_is_not():
    assert repair_times([1.0, 3.0, 4.0, 2.0, 5.0], 1.0) == ((1.0, 2.0, 3.0, 4.0, 5.0), 0)
    restarted = [i / 10 for i in range(40)] + [0.05 + i / 10 for i in range(20)]
    times, count = repair_times(restarted, 10.0)
    assert count == 20
    assert times[-1] == pytest.approx(5.9)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_reordered_frames_in_avi_are_found_by_their_order(codec):
    options = {"bf": "2", "crf": "4"} if codec == "libx264" else {"bf": "2", "q": "2"}
    data = video(solid_frames(24, 176, 144), fmt="avi", codec=codec, rate=24, options=options)
    media = PROCESSOR.process(data, "video")
    expected = sample_frames(24, 24, 8.0)
    assert np.allclose(media.frame_times, [i / 24 for i in expected])
    assert np.allclose(levels(media), [10 + 10 * i for i in expected], atol=6)
    assert media.warnings == ()


def test_raw_stream_without_a_clock_uses_its_rate():  # V6
    data = video(solid_frames(24), fmt="h264", rate=24)
    media = PROCESSOR.process(data, "video")
    assert len(media.frame_times) >= 7
    assert media.frame_times[0] == 0.0
    assert all(b > a for a, b in pairwise(media.frame_times))


def test_clock_that_stands_still_is_replaced_by_the_rate():  # V6
    data = bytearray(video(solid_frames(12), fmt="flv", codec="flv", rate=8))
    at = 9 + 4
    while at < len(data):  # every tag: type, 3 bytes of size, 4 of time, 3 of stream number
        size = int.from_bytes(data[at + 1 : at + 4], "big")
        data[at + 4 : at + 8] = bytes(4)
        at += 11 + size + 4
    media = PROCESSOR.process(bytes(data), "video")
    assert numbers(media) == list(range(12))
    assert media.frame_times == tuple(i / 8 for i in range(12))
    assert media.warnings == ("11 of 12 frame times repaired",)


def test_codec_without_a_decoder_is_named_as_such():  # V26
    data = video(solid_frames(3)).replace(b"avc1", b"evc1").replace(b"avcC", b"evcC")
    assert code(data) == "video_codec_unsupported"


def test_edit_list_hides_the_lead_in():  # V7
    """An MP4 that begins to play at its second half second; the lead-in is decoded, not shown."""
    data = bytearray(video(solid_frames(16), rate=8, options={"bf": "0", "g": "16"}))
    at = data.index(b"elst") + 4
    entries = int.from_bytes(data[at + 4 : at + 8], "big")
    assert entries == 1
    with av.open(io.BytesIO(bytes(data))) as container:
        ticks = container.streams.video[0].time_base.denominator
    data[at + 12 : at + 16] = (ticks // 2).to_bytes(4, "big")
    with av.open(io.BytesIO(bytes(data))) as container:
        assert any(p.is_discard for p in container.demux(video=0))
    media = PROCESSOR.process(bytes(data), "video")
    assert numbers(media) == list(range(4, 16))
    assert media.frame_times == tuple(i / 8 for i in range(12))


def test_size_change_is_fitted_to_the_first_frame():  # V45
    first = video(solid_frames(8, 64, 48), fmt="mpegts", rate=8)
    second = video(solid_frames(8, 96, 96), fmt="mpegts", rate=8)
    media = PROCESSOR.process(first + second, "video")
    assert (media.layout.width, media.layout.height) == (64, 48)
    assert {item.grid_thw[1:] for item in media.items} == {(4, 6)}
    assert any("size changes during the clip" in warning for warning in media.warnings)
    assert all(b > a for a, b in pairwise(media.frame_times))


def test_timeline_starts_at_its_first_frame():
    timeline = Timeline.build([5.0, 5.5, 6.0], [2.0], 0.001)
    assert (timeline.times, timeline.fps) == ((0.0, 0.5, 1.0), 2.0)


# ---------------------------------------------------------------------- animated pictures


def animation(fmt, durations, **options):
    frames = [Image.new("RGB", (56, 28), (10 + 60 * i, 0, 0)) for i in range(len(durations))]
    return encode(
        frames[0], fmt, save_all=True, append_images=frames[1:], duration=durations, **options
    )


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG"])
def test_animated_pictures_are_clips_with_their_own_delays(fmt):  # V44
    options = {"lossless": True} if fmt == "WEBP" else {}
    media = PROCESSOR.process(animation(fmt, [200, 500, 1000, 300], **options), "video")
    assert media.frame_times == pytest.approx((0.0, 0.2, 0.7, 1.7))
    assert [picture.getpixel((3, 3))[0] for picture in model_view(media)] == [10, 70, 130, 190]
    assert media.layout.groups[0].timestamp == "00:00:00.000"


def test_zero_delay_is_a_tenth_of_a_second():  # V44
    slow = MediaProcessor(dataclasses.replace(K3_MEDIA, sample_fps=30.0))
    assert slow.process(animation("GIF", [0, 0, 0]), "video").frame_times == pytest.approx(
        (0.0, 0.1, 0.2)
    )


def test_single_frame_gif_is_a_clip_and_still_pictures_are_not():
    assert len(PROCESSOR.process(encode(corners(), "GIF"), "video").frame_times) == 1
    for fmt in ("PNG", "JPEG", "WEBP", "TIFF", "BMP"):
        assert code(encode(corners(), fmt)) == "image_as_video"
    assert code(Image.new("RGB", (2, 2))) == "image_as_video"


def test_transparent_animation_lies_on_the_background():
    frames = [Image.new("RGBA", (56, 28), (255, 0, 0, 0)) for _ in range(2)]
    frames[1].putpixel((0, 0), (9, 9, 9, 255))
    data = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    view = model_view(PROCESSOR.process(data, "video"))[0]
    assert (view.getpixel((1, 1)), view.getpixel((9, 1))) == ((255,) * 3, (180,) * 3)


def test_gif_cut_in_the_middle_gives_its_beginning():
    grains = [noise((64, 64), 60 + i) for i in range(6)]
    data = encode(grains[0], "GIF", save_all=True, append_images=grains[1:], duration=200)
    media = PROCESSOR.process(data[: len(data) * 6 // 10], "video")
    assert 1 <= len(media.frame_times) < 6
    assert "damaged after frame" in media.warnings[0]


# ---------------------------------------------------------------------- what is no video


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "video_empty"),
        (b"<html></html>", "not_a_video"),
        (b"%PDF-1.4", "not_a_video"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not_a_video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not_a_video"),
        (b"\0" * 100, "not_a_video"),
        (b"\x1aE\xdf\xa3" + b"\0" * 50, "video_corrupt"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video_corrupt"),
    ],
)
def test_what_is_no_video_is_named(data, expected):  # V34
    assert code(data) == expected


def test_video_given_as_a_picture_is_named():
    with pytest.raises(MediaError, match="send it as a video") as info:
        PROCESSOR.process(video(solid_frames(2)), "image")
    assert info.value.code == "video_as_image"


def test_local_files_are_read_without_loading_them(tmp_path):
    path = tmp_path / "concat:a|b.bin"
    path.write_bytes(video(solid_frames(8), rate=8))
    assert numbers(PROCESSOR.process(path, "video")) == list(range(8))
    (tmp_path / "a.gif").write_bytes(animation("GIF", [100] * 3))
    assert PROCESSOR.process(tmp_path / "a.gif", "video").layout.width == 56


# ---------------------------------------------------------------------- limits and budgets


@pytest.mark.parametrize("rate", [8, None])
def test_frame_cap_lowers_the_rate_and_keeps_the_end(rate):  # V36, V39
    data = video(solid_frames(24), rate=8) if rate else variable([i * i * 10 for i in range(24)])
    media = MediaProcessor(K3_MEDIA, limits=MediaLimits(max_video_frames=5)).process(data, "video")
    assert len(media.frame_times) <= 5
    assert numbers(media)[0] == 0
    assert numbers(media)[-1] == 23


def test_token_cap_lowers_the_rate_and_keeps_the_end():
    tokens = plan_frame(64, 48, K3_MEDIA).num_tokens
    limits = MediaLimits(max_video_tokens=2 * tokens + 1)
    media = MediaProcessor(K3_MEDIA, limits=limits).process(
        video(solid_frames(24), rate=8), "video"
    )
    assert numbers(media) == list(sample_frames(24, 8, 8.0, 8))
    assert sum(item.num_tokens for item in media.items) == 2 * tokens


def test_whole_video_patch_budget_lowers_the_rate():
    _, rows, columns = plan_frame(64, 48, K3_MEDIA).grid_thw
    config = dataclasses.replace(K3_MEDIA, in_patch_limit_video=rows * columns * 6)
    media = MediaProcessor(config).process(video(solid_frames(24), rate=8), "video")
    assert len(media.frame_times) == 6
    assert numbers(media)[-1] == 23
    tiny = dataclasses.replace(K3_MEDIA, in_patch_limit_video=4)
    media = MediaProcessor(tiny).process(video(solid_frames(24, 112, 112), rate=8), "video")
    assert len(media.frame_times) == 1
    assert media.items[0].num_tokens <= 4


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_video_seconds": 2.0}, "video_too_long"),
        ({"max_source_frames": 23}, "video_too_many_frames"),
        ({"max_frame_pixels": 64 * 48 - 1}, "video_too_large"),
        ({"max_video_tokens": 5}, "video_too_large"),
        ({"max_decode_seconds": 0.0}, "video_timeout"),
    ],
)
def test_limits_are_client_errors(limits, expected):  # V35, V36
    processor = MediaProcessor(K3_MEDIA, limits=MediaLimits(**limits))
    assert code(video(solid_frames(24), rate=8), processor) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_video_seconds": 1.0}, "video_too_long"),
        ({"max_source_frames": 2}, "video_too_many_frames"),
        ({"max_decode_seconds": 0.0}, "video_timeout"),
        ({"max_image_pixels": 56 * 28 - 1}, "image_too_large"),
    ],
)
def test_limits_of_animated_pictures(limits, expected):
    processor = MediaProcessor(K3_MEDIA, limits=MediaLimits(**limits))
    assert code(animation("GIF", [500] * 3), processor) == expected


def test_long_clip_is_thinned_without_holding_its_frames():  # V39
    data = video(
        [np.zeros((240, 320, 3), np.uint8)] * 600, rate=30, options={"preset": "ultrafast"}
    )
    limits = MediaLimits(max_video_frames=4)
    with cpu_limit(10, time.process_time):
        media = MediaProcessor(K3_MEDIA, limits=limits).process(data, "video")
    assert media.frame_times == tuple(i / 30 for i in (0, 200, 399, 599))


# ---------------------------------------------------------------------- frames with times


def test_frame_lists_need_times():  # V41, V42
    frames = [Image.new("RGB", (30, 20))] * 5
    media = PROCESSOR.process_frames(frames, [0.0, 1.0, 2.0, 3.0, 61.5])
    assert [g.timestamp for g in media.layout.groups] == ["00:00:00.000", "00:01:01.500"]
    for times in ([0.0], [0.0, 1.0, 1.0, 2.0, 3.0]):
        with pytest.raises(MediaError) as info:
            PROCESSOR.process_frames(frames, times)
        assert info.value.code == "frame_times_mismatch"
    with pytest.raises(MediaError):
        PROCESSOR.process_frames([], [])
    few = MediaProcessor(K3_MEDIA, limits=MediaLimits(max_video_frames=4))
    with pytest.raises(MediaError, match="5 frames, a clip of this size may have 4"):
        few.process_frames(frames, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_clips_differ_from_pictures_and_from_other_groups_in_their_digest():
    media = PROCESSOR.process(video(solid_frames(8), rate=8), "video")
    digests = [item.digest for item in media.items]
    assert len(set(digests)) == 2
    again = PROCESSOR.process(video(solid_frames(8), rate=8), "video")
    assert [item.digest for item in again.items] == digests


def test_overlapping_clips_share_their_groups():
    """So that the encoder's outputs of one are found by the other."""
    frames = [Image.new("RGB", (56, 56), (40 * i, 0, 0)) for i in range(6)]
    frames = [frame for frame in frames for _ in range(2)]  # 12: groups of four
    whole = PROCESSOR.process_frames(frames, [i / 2 for i in range(12)])
    later = PROCESSOR.process_frames(frames[4:], [i / 2 for i in range(8)])
    digests = [[item.digest for item in media.items] for media in (whole, later)]
    assert len(set(digests[0])) == 3
    assert digests[1] == digests[0][1:]


def test_interlaced_clips_are_used_and_said():  # V31
    data = video(detailed_frames(8), rate=8, options={"x264-params": "interlaced=1"})
    media = PROCESSOR.process(data, "video")
    assert len(media.frame_times) == 8
    assert media.warnings == ("interlaced, fields left woven",)


@pytest.mark.parametrize(("matrix", "number"), [("ITU709", 1), ("ITU601", 6), ("BT2020", 9)])
def test_the_colour_matrix_of_the_stream_counts(matrix, number):  # V23
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace = number
        pixels = np.full((48, 64, 3), (40, 200, 90), np.uint8)
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=matrix)))
        container.mux(stream.encode())
    view = model_view(PROCESSOR.process(buffer.getvalue(), "video"))[0]
    assert np.allclose(view.getpixel((20, 20)), (40, 200, 90), atol=4)
