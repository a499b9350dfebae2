"""Samples go to files, TensorBoard and other processes, and marks to profilers."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmem
from jaxmem.errors import MissingExtraError, TrackError
from jaxmem.monitor import figures, marks, published
from jaxmem.units import MIB
from tests.monitor.allocator import Allocator


def test_samples_are_lines_of_json_that_say_what_they_are(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"before": 1}\n')
    with jaxmem.track("epoch", jsonl=path, publish=False) as t:
        t.point("mid")
    first, *lines = path.read_text().splitlines()
    assert json.loads(first) == {"before": 1}
    assert len(lines) >= 3
    for line in map(json.loads, lines):
        assert line["name"] == "epoch" and line["calls"] == 1
        assert line["devices"][0]["in_use"]["how"] == "estimated"
        assert line["rss"]["bytes"] > 2**20 and line["rss"]["how"] == "process"


def test_a_file_that_cannot_be_written_is_named_at_once(tmp_path):
    with pytest.raises(TrackError, match=r"nowhere/s\.jsonl.*No such file"):
        jaxmem.track("x", jsonl=tmp_path / "nowhere" / "s.jsonl")
    with pytest.raises(TrackError, match="cannot be written"):
        jaxmem.track("x", jsonl=tmp_path)


def test_a_disk_that_fills_up_ends_the_samples_and_not_the_run(tmp_path):
    t = jaxmem.track("x", jsonl=tmp_path / "s.jsonl", publish=False)

    t._writers[0].path = Path("/dev/full")  # pyright: ignore[reportAttributeAccessIssue]
    with t:
        pass
    assert any("No space left on device" in note for note in t.summary().notes)


@pytest.mark.parametrize("error", [RuntimeError("closed"), TypeError(), KeyError("tag")])
def test_a_writer_that_fails_ends_the_samples_and_not_the_run(error: Exception):
    class Failing:
        def add_scalar(self, *args: Any) -> None:
            raise error

    with jaxmem.track("x", tensorboard=Failing(), every=0.001, publish=False) as t:
        t.point("here")
    told = f"samples are no longer written: {str(error) or type(error).__name__}"
    assert told in t.summary().notes


def test_threads_that_publish_at_once_do_not_disturb_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    trackers = [jaxmem.track(f"t{n}", every=100.0) for n in range(8)]
    problems: list[str] = []

    def run(tracker: Any) -> None:
        with tracker:
            for _ in range(100):
                tracker.point("here")
                problems.append(published.PUBLISHER.problem)

    threads = [threading.Thread(target=run, args=(t,)) for t in trackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(problems) == {""}
    assert published.of_process(os.getpid()).alive


def test_a_writer_for_tensorboard_gets_scalars_named_by_what_they_are(monkeypatch):
    Allocator(monkeypatch).uses(5 * MIB)
    scalars: list[tuple[str, int, int]] = []

    class Summaries:
        def add_scalar(self, tag: str, value: int, step: int) -> None:
            scalars.append((tag, value, step))

    with jaxmem.track("epoch", tensorboard=Summaries(), publish=False):
        pass
    device = figures.name_of(jax.local_devices()[0])
    assert (f"epoch/{device}/in_use_bytes_allocator", 5 * MIB, 1) in scalars
    assert any(tag == f"epoch/{device}/peak_bytes_allocator_peak" for tag, *_ in scalars)
    assert any(tag == "epoch/host/rss_bytes_process" for tag, *_ in scalars)


def test_a_folder_for_tensorboard_has_the_scalars_in_its_own_format(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="needs the extra tracking")
    from tensorboardX.proto.event_pb2 import Event

    Allocator(monkeypatch).uses(5 * MIB)
    t = jaxmem.track("epoch", tensorboard=tmp_path / "logs", publish=False)
    with t:
        pass
    t.close()
    (file,) = (tmp_path / "logs").iterdir()
    rest, found = file.read_bytes(), {}
    while rest:  # Records: their length, its checksum, the event, and that of the event.
        length = int.from_bytes(rest[:8], "little")
        for value in Event.FromString(rest[12 : 12 + length]).summary.value:
            found[value.tag] = value.simple_value
        rest = rest[16 + length :]
    # TensorBoard's tags have no colon; its library puts a line in the place of each.
    device = figures.name_of(jax.local_devices()[0]).replace(":", "_")
    assert found[f"epoch/{device}/in_use_bytes_allocator"] == 5 * MIB
    assert found["epoch/host/rss_bytes_process"] > 0


def test_a_range_without_nvtx_is_that_of_jax_alone():
    """Each tracked call makes one: what holds several together costs as much as all the rest."""
    assert type(marks.mark("epoch", None)) is jax.profiler.TraceAnnotation


def test_ranges_of_the_real_nvtx_open_and_close():
    """Without Nsight Systems they go nowhere; that they can be set and nest is seen here."""
    pytest.importorskip("nvtx", reason="needs the extra tracking")
    with jaxmem.track("outer", nvtx=True, publish=False) as outer, outer:
        pass
    assert outer.calls == 2


@pytest.mark.parametrize("library", ["tensorboardX", "nvtx"])
def test_a_library_that_is_missing_is_named_with_its_extra(library: str, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    options: dict[str, Any] = {"tensorboard": tmp_path} if library != "nvtx" else {"nvtx": True}
    with pytest.raises(MissingExtraError, match=rf"{library}.*jaxmem\[tracking\]"):
        jaxmem.track("x", **options)
    jaxmem.track("x", publish=False)


def test_marks_are_set_for_profilers(monkeypatch):
    ranges: list[str] = []

    class Range:
        def __init__(self, name: str, domain: str = ""):
            self.name = f"{domain}/{name}" if domain else name

        def __enter__(self):
            ranges.append(f"+{self.name}")

        def __exit__(self, *error: Any):
            ranges.append(f"-{self.name}")

    class Nvtx:
        annotate = Range

    monkeypatch.setitem(sys.modules, "nvtx", Nvtx)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(marks.jax.profiler, "TraceAnnotation", Range)
    with jaxmem.track("epoch", publish=False):
        ranges.append("body")
    assert ranges == ["+epoch", "+jaxmem/epoch", "body", "-jaxmem/epoch", "-epoch"]
    ranges.clear()
    with jaxmem.track("epoch", nvtx=False, publish=False):
        pass
    assert ranges == ["+epoch", "-epoch"]
