"""Draws and batches of a buffer wait for each other, within the range and without end."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import random
import threading
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, SliceSampler

from tests.buffers import buffer_of
from tests.collectors.chats import Chat
from tests.collectors.runs import beside, collecting
from tests.pages import code_of
from tests.refusals import check_refused, refused
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.collectors import CollectionEndedError, MultiTurnCollector, SampleRatio
from torchrl_mt.collectors.scheduling import sample_ratio
from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.threads import WatchedThread

of_episodes = partial(buffer_of, 10_000, EpisodeSampler)
of_clips = partial(buffer_of, 10_000, ClipSampler)


def collector_of(engine, buffer, ratio, data=None, *, n=4, **kwargs):
    data = data or ({"turns": 1 + k % 3} for k in itertools.count())
    return collecting(Chat, engine, data, n=n, replay_buffer=buffer, rate_limit=ratio, **kwargs)


class Writer:
    """Writes batches of nothing."""

    def __init__(self, ratio, sizes, seen=lambda: None):
        self.ratio, self.sizes, self.seen, self.closed = ratio, sizes, seen, False
        self.thread = None
        self.pace = ratio.writer(lambda: self.thread)

    def start(self):
        self.thread = WatchedThread(self.run, lambda: False, "writer")

    def run(self):
        for size in self.sizes:
            self.pace.begin(size, lambda: self.closed)
            if self.closed:
                return
            self.pace.wrote(size)
            self.seen()


def draw_until_the_end(ratio, sizes, seen, writers):
    with contextlib.suppress(CollectionEndedError):
        for rows in sizes:
            with ratio.draw(rows):
                pass
            seen()
            if all(writer.closed for writer in writers):
                return


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(
    minimum=st.sampled_from([0, 0.3, 1, 2.5]),
    width=st.sampled_from([0, 0.1, 1, math.inf]),
    first=st.integers(1, 20),
    batches=st.lists(sizes, min_size=1, max_size=3),
    draws=st.lists(sizes, min_size=1, max_size=3),
)
def test_threads_stay_in_the_range_and_come_to_an_end(minimum, width, first, batches, draws):
    """Any sizes of batches and draws, any number of collectors and learners, also where min = max."""
    ratio = SampleRatio(minimum, max(minimum + width, 0.1), min_size_to_sample=first)
    most_written = max(map(max, batches))
    rows_at_once = sum(map(max, draws))
    problems = []

    def check():
        now = ratio.state_dict()
        drawn, written = now["drawn"], now["written"]
        if drawn > ratio.maximum * written:
            problems.append(("too many", now))
        slack = rows_at_once + minimum * max(most_written, first + most_written - 1)
        if drawn < minimum * written - slack:
            problems.append(("too few", now))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_ratio, "_POLL", 0.001)
        writers = [Writer(ratio, itertools.cycle(each), check) for each in batches]
        draw = partial(draw_until_the_end, seen=check, writers=writers)
        given = [(ratio, itertools.cycle(each)) for each in draws]
        learners = [threading.Thread(target=draw, args=args, daemon=True) for args in given]
        for each in (*writers, *learners):
            each.start()
        enough = 60 * len(batches)
        wait_until(lambda: ratio.written >= enough and (ratio.drawn >= minimum * 30 or problems))
        for writer in writers:
            writer.closed = True
        for thread in (*(writer.thread for writer in writers), *learners):
            thread.join(PATIENCE)
    assert not problems
    assert all(writer.thread.error is None for writer in writers)
    assert ratio._drawing == 0
    assert not ratio._waiting


@given(
    drawn=st.integers(0, 100),
    written=st.integers(0, 100),
    rows=st.integers(1, 100),
    first=st.integers(1, 50),
    low=st.floats(0, 5),
    width=st.floats(0, 5),
)
def test_a_draw_that_waits_lets_a_batch_begin(drawn, written, rows, first, low, width):
    ratio = SampleRatio(low, low + width + 0.01, min_size_to_sample=first)
    ratio.load_state_dict({"drawn": drawn, "written": written})
    ratio._waiting.append(rows)
    assert ratio._may_draw(rows, written) or ratio._may_begin()


def test_a_learner_and_a_collector_in_the_background(engine):
    ratio, buffer = SampleRatio(2, 4), of_episodes(batch_size=8)
    with collector_of(engine, buffer, ratio) as collector:
        collector.start()
        ratios = []
        for _ in range(40):
            assert len(buffer.sample()["next", "done"]) >= 8
            stats = collector.stats()
            assert stats["rate/drawn"] <= 4 * stats["rate/written"]
            assert stats["rate/drawn"] >= 2 * (stats["rate/written"] - 4) - 8
            ratios.append(stats["rate/ratio"])
        assert 1.9 <= ratios[-1] <= 4
        # It stops by itself, a batch beyond the minimum.
        wait_until(lambda: collector.stats()["accepted"] == 164)
        waited = collector.stats()["rate/waiting_writer"]
        wait_until(lambda: collector.stats()["rate/waiting_writer"] > waited)
        assert collector.stats()["started"] == collector.stats()["rate/written"] == 164
    assert collector.stats()["rate/waiting_sampler"] > 0


def test_iterating_in_the_learners_thread_raises_where_it_would_wait_for_itself(engine):
    ratio, buffer = SampleRatio(2, 4), of_episodes(batch_size=8)
    with collector_of(engine, buffer, ratio) as collector:
        with pytest.raises(RuntimeError, match=r"min_size_to_sample is 1.*start\(\) the collector"):
            buffer.sample()
        batches = collector.iterator()
        next(batches)
        with pytest.raises(RuntimeError, match=r"Draw 8 more rows before the next batch, or start"):
            next(batches)
        batches = collector.iterator()  # An error ends a generator.
        buffer.sample()
        for _ in range(5):
            next(batches)
            buffer.sample()
        assert ratio.stats()["rate/ratio"] == 2.0
        for _ in range(6):
            buffer.sample()
        with pytest.raises(RuntimeError, match=r"0 rows may be drawn now. Draw less for each ba"):
            buffer.sample()
        assert ratio.drawn == 96  # A refused draw does not count.


def test_the_end_of_the_run_ends_the_draws(engine):
    ratio, buffer = SampleRatio(1, 2), of_episodes(batch_size=4)
    with collector_of(engine, buffer, ratio, total_episodes=8) as collector:
        collector.start()
        batches = iter(buffer)
        for _ in range(4):
            next(batches)
        with pytest.raises(CollectionEndedError, match="16 rows were drawn and 8 episodes written"):
            next(batches)
        ratio.detach()
        buffer.sample()
    assert ratio.drawn == 16


def test_the_failure_of_the_collector_is_the_cause_of_the_draws(engine):
    buffer, bad = of_episodes(batch_size=4), {"fail_at": 1, "error": ValueError("broken")}
    data = [{"turns": 1}] * 4 + [bad] * 9
    collector = collector_of(engine, buffer, SampleRatio(1, 1), data, max_consecutive_failures=2)
    collector.start()
    buffer.sample()
    with pytest.raises(RuntimeError, match="the collector has failed") as caught:
        buffer.sample()
    assert "in a row" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="in a row"):
        collector.async_shutdown()


def test_shutdown_wakes_both_sides(engine):
    ratio, buffer = SampleRatio(1, 1), of_episodes(batch_size=4)
    collector = collector_of(engine, buffer, ratio)
    collector.start()
    wait_until(lambda: collector.stats()["rate/waiting_writer"] > 0)
    collector.async_shutdown()  # The wait ends, without an error.
    assert not collector.is_running

    ended = []
    collector = collector_of(engine, buffer, ratio, [{"hang_at": 1}] * 4)
    collector.start()
    buffer.sample()

    def draw():
        with pytest.raises(CollectionEndedError) as caught:
            buffer.sample()
        ended.append(str(caught.value))

    with beside(draw):
        wait_until(lambda: collector.stats()["rate/waiting_sampler"] > 0)
        collector.shutdown()
    assert "the collector has ended" in ended[0]


def test_a_draw_waits_no_longer_than_its_timeout(engine):
    ratio, buffer = SampleRatio(0, 1, timeout=0.1), of_episodes(batch_size=4)
    with collector_of(engine, buffer, ratio, [{"hang_at": 1}] * 4) as collector:
        collector.start()
        with pytest.raises(TimeoutError, match=r"waited 0\.1 seconds for more episodes: 0 rows"):
            buffer.sample()


def test_a_buffer_that_cannot_be_sampled_yet_holds_no_collector(engine):
    """All first episodes are shorter than a clip."""
    ratio, buffer = SampleRatio(1, 2), of_clips(slice_len=3, batch_size=6)
    data = [{"turns": 2}] * 12 + [{"turns": 3}] * 100
    with collector_of(engine, buffer, ratio, data) as collector:
        collector.start()
        wait_until(buffer.can_sample)
        buffer.sample()


@pytest.mark.parametrize(
    ("sampler", "rows"),
    [
        (EpisodeSampler(), 12),
        (EpisodeSampler(group_key="group"), 24),
        (EpisodeSampler(group_key="group", group_size=3), 36),
        (ClipSampler(slice_len=4), 3),
        (ClipSampler(num_slices=6), 6),
        (SliceSampler(slice_len=4), 3),
        (None, 12),
    ],
)
def test_a_row_is_what_the_sampler_draws(sampler, rows):
    ratio = SampleRatio(1, 2)
    storage = EpisodeStorage(10) if sampler is not None else LazyTensorStorage(10)
    ratio.attach(ReplayBuffer(storage=storage, sampler=sampler), group_size=2)
    assert ratio._rows(12) == rows


def test_prefetched_batches_count_when_they_are_drawn(engine):
    ratio, buffer = SampleRatio(0, 2), of_episodes(batch_size=2, prefetch=3)
    with collector_of(engine, buffer, ratio) as collector:
        next(iter(collector))
        for drawn in (2, 4, 6, 8):
            buffer.sample()
            assert ratio.drawn == drawn
        with pytest.raises(RuntimeError, match="8 rows were drawn"):
            buffer.sample()


def test_a_failed_draw_does_not_count(engine):
    ratio, buffer = SampleRatio(0, 2), of_clips(slice_len=9)
    with collector_of(engine, buffer, ratio) as collector:
        next(iter(collector))
        with pytest.raises(Exception, match="no stored episode holds a clip"):
            buffer.sample(18)
        with pytest.raises(RuntimeError, match="batch_size"):
            buffer.sample()
    assert ratio.state_dict() == {"drawn": 0, "written": 4}


def test_collectors_of_one_buffer_share_a_ratio(engine):
    ratio, buffer = SampleRatio(2, 3), of_episodes(batch_size=6)
    with (
        collector_of(engine, buffer, ratio, n=4) as one,
        collector_of(engine, buffer, ratio, n=2) as other,
    ):
        for collector in (one, other):
            collector.start()
        for _ in range(30):
            buffer.sample()
            assert ratio.drawn <= 3 * ratio.written
        assert one.stats()["rate/drawn"] == other.stats()["rate/drawn"] == 180
        assert ratio.written >= 60


def test_the_counts_survive_a_restart(engine, tmp_path):
    def parts():
        buffer = of_episodes(batch_size=4)
        collector = collector_of(engine, buffer, SampleRatio(1, 2), [{"turns": 1}] * 40)
        return {"buffer": buffer, "collector": collector}

    run = parts()
    with run["collector"] as collector:
        next(iter(collector))
        run["buffer"].sample()
        RunCheckpoint(tmp_path).save(1, **run)
    again = parts()
    with again["collector"] as collector:
        assert RunCheckpoint(tmp_path).restore(**again) == 1
        assert collector.rate_limit.state_dict() == {"drawn": 4, "written": 4}
        again["buffer"].sample()
        with pytest.raises(RuntimeError, match="8 rows were drawn and 4 episodes written"):
            again["buffer"].sample()


HOLDER, HELD = SampleRatio(1, 2), of_episodes()
HOLDER.attach(HELD)
REMOTE = RayReplayBuffer.__new__(RayReplayBuffer)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("maximum", SampleRatio, 2, 1),
        refused("maximum", SampleRatio, -1, 1),
        refused("maximum", SampleRatio, 0, 0),
        refused("maximum", SampleRatio, math.inf, math.inf),
        refused("maximum", SampleRatio, math.nan, 1),
        refused("min_size_to_sample", SampleRatio, 1, 2, min_size_to_sample=0),
        refused("timeout", SampleRatio, 1, 2, timeout=0),
        refused("RayReplayBuffer", SampleRatio(1, 2).attach, REMOTE),
        refused("another SampleRatio", SampleRatio(1, 2).attach, HELD),
        refused("another buffer", HOLDER.attach, of_episodes()),
        refused("cannot be copied or sent", pickle.dumps, HELD, error=TypeError),
        refused("cannot be copied or sent", copy.deepcopy, HELD, error=TypeError),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(call, error, text):
    check_refused(call, error, text)


def test_a_collector_counts_by_a_ratio_what_it_writes_to_a_buffer(engine):
    with pytest.raises(TypeError, match="rate_limit must be a SampleRatio, got 2"):
        collector_of(engine, of_episodes(), 2)
    with pytest.raises(ValueError, match="give a replay_buffer"):
        collector_of(engine, None, SampleRatio(1, 2))


def test_a_buffer_whose_ratio_lets_go_of_it_can_be_copied():
    ratio, buffer = SampleRatio(1, 2), of_episodes(batch_size=4)
    ratio.attach(buffer)
    ratio.detach()
    copy.deepcopy(buffer)


def test_a_long_wait_is_logged(engine, caplog, monkeypatch):
    monkeypatch.setattr(sample_ratio, "WARN_SECONDS", 0.0)
    buffer = of_episodes(batch_size=4)
    with collector_of(engine, buffer, SampleRatio(1, 1)) as collector:
        collector.start()
        wait_until(lambda: "the collector has waited" in caplog.text)
    assert "minimum=1 and maximum=1 rows per episode" in caplog.text


def test_the_loop_of_the_page_runs(engine):
    classes = (ReplayBuffer, EpisodeStorage, EpisodeWriter, EpisodeSampler)
    run = {each.__name__: each for each in (*classes, MultiTurnCollector, SampleRatio)}
    updates = []
    data = [{"turns": 2}] * 100
    run |= {"env": Chat, "engine": engine, "data": data, "model": None, "num_updates": 6}
    run["update"] = lambda model, rows: updates.append(len(rows))
    exec(code_of("collecting.rst", "How often episodes are drawn"), run)
    assert updates == [32] * 6
    assert run["collector"].stats()["rate/drawn"] == 96
    assert 24 <= run["collector"].stats()["rate/written"] <= 56


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4, 6])  # with and without room, prefetching, staleness
def test_a_real_run_with_random_sizes_stays_in_the_range(engine, seed):
    rng = random.Random(seed)
    low = rng.choice([0.5, 1, 3])
    ratio = SampleRatio(low, low * rng.choice([1, 1.5, 4]), min_size_to_sample=rng.randint(1, 20))
    episodes, rows = rng.choice([1, 4, 16]), rng.choice([1, 7, 64])
    # With max_staleness, the draws between two updates must be fed by one batch.
    staleness = rng.choice([None, 100]) if rows <= ratio.maximum * episodes else None
    buffer = of_episodes(prefetch=rng.choice([None, 2]), batch_size=rows)
    with collector_of(engine, buffer, ratio, n=episodes, max_staleness=staleness) as collector:
        collector.start()
        end = time.monotonic() + 3
        draws = 0
        while time.monotonic() < end or draws < 10:
            buffer.sample()
            draws += 1
            drawn, written = ratio.state_dict().values()
            assert drawn <= ratio.maximum * written
            slack = ratio.min_size_to_sample + episodes
            assert drawn >= ratio.minimum * (written - slack) - rows
            collector.increment_version()
            time.sleep(rng.choice([0, 0, 0.01]))
        assert drawn == draws * rows
        assert ratio.minimum * 0.9 <= drawn / (written - slack) or written < 20 * slack
