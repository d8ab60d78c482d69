"""The LMDeploy connector under LMDeploy's own scheduler, over a real node and two ranks, without a model (see lmdeploy_rig)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.messages import MessageStatus

from tests.node.lmdeploy_rig import Rig, prompt
from tests.node.scripted_peer import until


@pytest.fixture
def rig(runtime_dir: Path) -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def loaded(rig: Rig) -> int:
    return int(rig.half.counters["loaded_tokens"])


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("block", "kernel"), [(64, -1), (16, -1), (32, -1), (128, -1), (128, 64), (96, -1)])
def test_a_prompt_comes_back_in_whole_blocks(runtime_dir: Path, block: int, kernel: int, prefix_caching: bool) -> None:
    rig = Rig(block=block, kernel=kernel, prefix_caching=prefix_caching)
    try:
        tokens = prompt(300, 1)
        rig.store(tokens)
        rig.scheduler.block_trie.evict(1000)
        other = rig.add([*tokens, 5])
        rig.prefill(other)
        expected = min(256, 300 // 64 * 64) // block * block
        assert loaded(rig) == expected
        assert other.cached_tokens == expected
        assert rig.right(other, 300)
    finally:
        rig.close()


@pytest.mark.parametrize("n", [255, 256, 257, 100])
def test_the_last_token_is_always_computed(rig: Rig, n: int) -> None:
    tokens = prompt(n, 2)
    rig.store(tokens)
    again = rig.add(tokens)
    rig.prefill(again)
    assert loaded(rig) == (n - 1) // 64 * 64
    assert rig.right(again, n)


def test_a_local_hit_is_extended(runtime_dir: Path) -> None:
    rig = Rig(block=16, prefix_caching=True)
    try:
        tokens = prompt(300, 3)
        rig.store(tokens)
        rig.scheduler.block_trie.evict(1000)
        short = rig.add(tokens[:120])  # its first page is loaded, the rest of it computed: a local hit of 112 tokens for the next
        rig.prefill(short)
        assert loaded(rig) == 64
        long = rig.add(tokens)
        rig.prefill(long)
        assert rig.half.counters["local_tokens"] == 112
        assert loaded(rig) == 64 + 256 - 112, "from the middle of a page on"
        assert rig.right(long, 300)
    finally:
        rig.close()


def test_pages_filled_by_decode_steps_are_saved(rig: Rig) -> None:
    tokens = prompt(100, 4)
    sequence = rig.add(tokens)
    rig.prefill(sequence)
    # As the engine does: the next step is planned and started before the output of the one before is applied.
    batch, metadata, work = rig.plan(decode=True)
    position = len(tokens)
    for _ in range(100):
        output = rig.execute(metadata, [w._replace(first=position, last=position + 1) for w in work])
        ahead = rig.plan(decode=True)
        rig.apply(output, batch, work)
        (batch, metadata, work), position = ahead, position + 1
    every = [int(t) for t in sequence.all_ids]
    assert len(every) == 201
    until(lambda: rig.stored(every) == 3)
    rig.end(sequence)
    again = rig.add([*every[:196], 9])
    rig.prefill(again)
    assert loaded(rig) == 192 and rig.right(again, 192)


def test_prompts_only_where_decode_is_not_to_be_saved(runtime_dir: Path) -> None:
    rig = Rig(save_decode=False)
    try:
        tokens = prompt(100, 5)
        sequence = rig.add(tokens)
        rig.prefill(sequence)
        for _ in range(60):
            rig.step(decode=True)
        until(lambda: rig.stored(tokens) == 1)
        assert rig.stored([int(t) for t in sequence.all_ids]) == 1
    finally:
        rig.close()


def test_saves_hold_their_blocks_until_all_ranks_have_reported(rig: Rig) -> None:
    tokens = prompt(256, 6)
    sequence = rig.add(tokens)
    _, metadata, work = until(lambda: (step := rig.plan())[2] and step)
    assert [lease.operation_id for lease in metadata.get_save_block_leases()] == [metadata.plan.step]
    rig.end(sequence)  # aborted: paging lets go of its blocks while the step is still to run
    assert rig.scheduler.block_manager.get_num_free_gpu_blocks() == rig.free_at_start - 4
    assert rig.scheduler.has_unfinished()
    rig.scheduler.update_connector_output(rig.execute(metadata, work))
    assert rig.scheduler.block_manager.get_num_free_gpu_blocks() == rig.free_at_start
    assert not rig.scheduler.has_unfinished()
    until(lambda: rig.stored(tokens) == 4)


def test_a_page_that_one_rank_did_not_copy_is_never_seen(rig: Rig) -> None:
    tokens = prompt(200, 7)
    sequence = rig.add(tokens)
    rig.prefill(sequence, lazy=[1])
    assert rig.half.counters["discarded_pages"] == 3 and rig.stored(tokens) == 0
    rig.step(decode=True)
    until(lambda: rig.stored(tokens) == 3, 10)  # the blocks are still there, so the next step saves them after all


def damage(rig: Rig, rank: int, change: Any) -> None:
    """From now on `change(half, load)` meets each load of that rank."""
    half = rig.ranks[rank].connector._worker
    assert half is not None
    original = half._load
    half._load = lambda load, digest: (change(half, load), original(load, digest))[1]  # type: ignore[method-assign]


def drop(half: Any, load: Any) -> None:
    load.slots[len(load.slots) // 2] = (1 << 62) | 1


def flip(half: Any, load: Any) -> None:
    with half._client.arena().pin(load.epoch, load.generation) as pinned:
        pinned.slot(load.slots[len(load.slots) // 2])[100] ^= 4


def swap(half: Any, load: Any) -> None:
    with half._client.arena().pin(load.epoch, load.generation) as pinned:
        middle = len(load.slots) // 2
        pinned.slot(load.slots[middle])[:] = pinned.slot(load.slots[middle - 1])


def truncate(half: Any, load: Any) -> None:
    with half._client.arena().pin(load.epoch, load.generation) as pinned:
        pinned.slot(load.slots[len(load.slots) // 2])[-4096:] = 0


def error(half: Any, load: Any) -> None:
    raise RuntimeError("planted by a test")


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("kind", [drop, flip, swap, truncate, error])
def test_a_failed_load_is_computed_and_poisons_nothing(runtime_dir: Path, kind: Any, prefix_caching: bool) -> None:
    rig = Rig(prefix_caching=prefix_caching)
    try:
        prefix = prompt(600, 8)
        rig.store(prefix)
        rig.scheduler.block_trie.evict(1000)
        damage(rig, 1, kind)
        first, second = rig.add([*prefix, *prompt(100, 9)]), rig.add([*prefix, *prompt(100, 10)])
        rig.prefill(first, second)
        assert rig.half.counters["failed_loads"] > 0
        assert rig.right(first, 700) and rig.right(second, 700), "what could not be loaded was computed"
        rig.ranks[1].connector._worker._load = type(rig.ranks[1].connector._worker)._load.__get__(rig.ranks[1].connector._worker)  # type: ignore[method-assign,union-attr]
        every = [[int(t) for t in s.all_ids] for s in (first, second)]
        for sequence in (first, second):
            rig.end(sequence)
        until(lambda: all(rig.stored(tokens) == 10 for tokens in every))
        rig.scheduler.block_trie.evict(1000)
        rig.half._failed.clear()
        before = loaded(rig)
        for tokens in every:  # a fresh reader of everything that was stored meanwhile
            reader = rig.add([*tokens, 3])
            rig.prefill(reader)
            assert rig.right(reader, 700)
            rig.end(reader)
            rig.scheduler.block_trie.evict(1000)
        assert loaded(rig) - before == 2 * 640
    finally:
        rig.close()


def test_a_failed_load_that_nobody_reports_is_wrong(rig: Rig) -> None:
    """The check above sees what a connector without reports would do."""
    prefix = prompt(600, 11)
    rig.store(prefix)
    damage(rig, 1, flip)
    rig.ranks[1].connector._worker._verify = False  # type: ignore[union-attr]
    sequence = rig.add([*prefix, 5])
    rig.prefill(sequence)
    assert not rig.right(sequence, 600)


def test_an_abort_while_pages_are_loaded(rig: Rig) -> None:
    tokens = prompt(600, 12)
    rig.store(tokens)
    rig.half._load_step_pages = 2
    sequence = rig.add([*tokens, 5])
    batch, metadata, work = rig.plan_load()
    rig.end(sequence)
    assert rig.scheduler.has_unfinished(), "its blocks are still being written"
    rig.apply(rig.execute(metadata, work), batch, work)
    until(lambda: (rig.step(), not rig.scheduler.has_unfinished())[1])
    assert rig.scheduler.block_manager.get_num_free_gpu_blocks() == rig.free_at_start
    assert rig.half._staged_bytes == 0 and not rig.half._requests and not rig.half._steps
    assert rig.half.counters["loads"] == 0 and rig.ranks[0].connector._worker.counters["loads"] <= 2, "it ended before all was loaded"  # type: ignore[union-attr]


def test_an_abort_while_pages_are_staged(rig: Rig) -> None:
    tokens = prompt(600, 13)
    rig.store(tokens)
    sequence = rig.add([*tokens, 5])
    rig.plan()
    rig.end(sequence)
    assert rig.half._staged_bytes == 0 and not rig.half._requests and not rig.scheduler.has_unfinished()


def test_a_stopped_session_goes_on_with_its_next_turn(rig: Rig) -> None:
    tokens = prompt(300, 14)
    rig.store(tokens)
    sequence = rig.add(tokens)
    rig.prefill(sequence)
    for _ in range(3):
        rig.step(decode=True)
    rig.scheduler.stop_session(sequence.session_id)
    rig.running.remove(sequence)
    sequence.update_token_ids(torch.tensor(prompt(200, 15)))
    sequence.activate()
    rig.prefill(sequence)
    every = [int(t) for t in sequence.all_ids]
    assert len(every) == 300 + 4 + 200 + 1
    until(lambda: rig.stored(every) == 7)
    assert rig.right(sequence, 504)


def test_a_large_load_takes_several_steps_beside_decode(rig: Rig) -> None:
    tokens = prompt(600, 16)
    rig.store(tokens)
    runner = rig.add(prompt(50, 17))
    rig.prefill(runner)
    rig.half._load_step_pages = 4
    sequence = rig.add([*tokens, 5])
    _, metadata, work = rig.plan_load()
    loads = []
    while True:
        loads.append(sum(len(load.slots) for load in metadata.plan.loads))
        rig.apply(rig.execute(metadata, work), [], work)
        if sequence.status != MessageStatus.WAITING_FOR_REMOTE_KVS:
            break
        _, metadata, work = rig.plan(decode=True)
        assert [w.sequence for w in work] == [runner]
    assert loads == [4, 4, 1]
    rig.prefill(sequence)
    assert rig.right(sequence, 600)


def test_sequences_that_stay_away_from_the_cache(rig: Rig) -> None:
    tokens = prompt(300, 18)
    rig.store(tokens)
    saved = rig.half.counters["saved_pages"]
    sequence = rig.add([*tokens, *prompt(100, 19)], adapter_name="unknown")
    rig.prefill(sequence)
    image = rig.add([*tokens, *prompt(100, 20)])
    image.history_multimodals.multimodals["image"] = [SimpleNamespace(start=20, end=30)]
    rig.prefill(image)
    logits = rig.add([*tokens, *prompt(100, 21)])
    logits.sampling_param.out_logits = True
    rig.prefill(logits)
    assert loaded(rig) == 0
    assert rig.half.counters["skipped_lora_unreadable"] == 1
    until(lambda: rig.half.counters["saved_pages"] == saved + 2)  # of the third, which loads nothing; its first four are stored


def test_adapters_have_pages_of_their_own(rig: Rig) -> None:
    tokens = prompt(300, 31)
    rig.store(tokens)
    rig.connector._adapters = {"a": "1" * 32, "b": "2" * 32, "same as a": "1" * 32}
    for name, found in (("a", 0), ("b", 0), ("a", 256), ("same as a", 256), ("b", 256)):
        before = loaded(rig)
        sequence = rig.add([*tokens, 5], adapter_name=name)
        rig.prefill(sequence)
        assert loaded(rig) - before == found
        pages = rig.half._requests[str(sequence.seq_id)].hasher.hashes
        rig.end(sequence)
        until(lambda pages=pages: rig.pages(pages) == 4)  # type: ignore[misc]


def test_a_killed_node_costs_a_miss_and_comes_back(rig: Rig) -> None:
    tokens = prompt(300, 22)
    rig.store(tokens)
    old = rig.client.node_pid
    sequence = rig.add([*tokens, 5])
    batch, metadata, work = rig.plan_load()
    os.kill(old, signal.SIGKILL)
    epoch = metadata.plan.loads[0].epoch
    until(lambda: not any(rank.connector._client.epoch == epoch for rank in rig.ranks))
    rig.apply(rig.execute(metadata, work), batch, work)
    assert rig.half.counters["failed_loads"] == 1
    rig.prefill(sequence)
    assert rig.right(sequence, 301)
    until(lambda: rig.client.ready and rig.client.node_pid != old)
    rig.settle()
    other = prompt(300, 23)
    rig.store(other)
    rig.prefill(rig.add([*other, 5]))
    assert loaded(rig) >= 256


def test_sleep_throws_away_what_was_under_way(rig: Rig) -> None:
    tokens, more = prompt(300, 24), prompt(200, 25)
    rig.store(tokens)
    loading, saving = rig.add([*tokens, 5]), rig.add(more)
    rig.plan_load()
    for sequence in (loading, saving):
        rig.end(sequence)
    rig.scheduler.finish_kv_transfers_after_worker_drain()
    until(lambda: (rig.step(), not rig.half._steps)[1])
    assert rig.half._staged_bytes == 0 and rig.client.counters()["slots_taken"] == 0
    assert rig.scheduler.block_manager.get_num_free_gpu_blocks() == rig.free_at_start
    assert rig.stored(more) == 0


def test_changed_weights_end_the_cache(rig: Rig) -> None:
    tokens = prompt(300, 26)
    rig.store(tokens)
    rig.connector.weights_changed()
    rig.prefill(rig.add([*tokens, *prompt(100, 27)]))
    assert loaded(rig) == 0 and rig.half.counters["saved_pages"] == 4


def test_a_rank_that_cannot_copy_stops_the_cache(rig: Rig) -> None:
    rig.ranks[1].connector._unable = "an unknown layout"
    tokens = prompt(300, 28)
    rig.prefill(rig.add(tokens))
    assert rig.stored(tokens) == 0
    rig.prefill(rig.add(tokens))
    assert rig.half.counters["skipped_worker_unable"] == 1 and rig.half.counters["saved_pages"] == 0
