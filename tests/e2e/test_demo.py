"""The demo's steps on the real cluster: what one vLLM server stored, another finds, and everything is given back."""

import json
import re
from dataclasses import asdict

import pytest

from hack.cache import REPOSITORY
from hack.demo.run import OUTPUT
from hack.demo.servers import demo_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

MIB = 1 << 20
SUMMARY_KEYS = {
    "pool_capacity_bytes", "used_bytes", "deduplicated_bytes", "cached_tokens_first_request_b", "outputs_equal",
    "cached_tokens_after_restart", "replicated_layout", "plain_layout_capacity_chunks", "capacity_chunks",
    "stored_bytes_per_rank", "hugepages_free_before", "hugepages_free_after", "worker_kernel_page_size_bytes",
}  # fmt: skip
# of 300 prompt tokens, all whole blocks but the last: 288 with blocks of 16 or 32
LEAST_CACHED_TOKENS = 256


def test_the_pool_is_ready_with_the_capacity_that_was_asked_for(demo_result):
    assert demo_result.summary.pool_capacity_bytes == 256 * MIB
    header, row, *_ = demo_result.shared.kubernetes_view.splitlines()
    columns = dict(zip(header.split(), row.split(), strict=False))
    assert columns["READY"] == "True"
    assert columns["CAPACITY"] == "256Mi"


def test_a_server_that_never_saw_the_prompts_loads_them(demo_result):
    assert [answer.cached_tokens for answer in demo_result.shared.cold_a] == [0, 0, 0]
    assert min(answer.cached_tokens for answer in demo_result.shared.first_b) >= LEAST_CACHED_TOKENS
    assert demo_result.shared.figures.cross_engine_hits > 0


def test_its_outputs_are_those_of_the_first_servers_warm_requests(demo_result):
    assert [answer.text_tokens for answer in demo_result.shared.first_b] == [
        answer.text_tokens for answer in demo_result.shared.warm_a
    ]


def test_outputs_change_when_zeros_are_loaded(demo_result):
    assert min(demo_result.zeroed_cached_tokens) >= LEAST_CACHED_TOKENS
    for zeroed, warm in zip(demo_result.zeroed_b, demo_result.shared.warm_a, strict=True):
        assert zeroed != warm.text_tokens


def test_a_recreated_server_is_warm_at_once_with_the_same_outputs(demo_result):
    assert min(answer.cached_tokens for answer in demo_result.shared.restarted_b) >= LEAST_CACHED_TOKENS
    assert [answer.text_tokens for answer in demo_result.shared.restarted_b] == [
        answer.text_tokens for answer in demo_result.shared.warm_a
    ]


def test_one_copy_serves_both_ranks_and_each_rank_copied_half_of_it(demo_result):
    figures = demo_result.shared.figures
    assert demo_result.summary.replicated_layout
    assert figures.num_chunks > 0
    assert figures.deduplicated_bytes == figures.used_bytes
    assert figures.stored_bytes_per_rank == [figures.used_bytes // 2, figures.used_bytes // 2]


def test_the_plain_layout_holds_half_as_many_chunks(demo_result):
    summary = demo_result.summary
    assert summary.capacity_chunks == pytest.approx(2 * summary.plain_layout_capacity_chunks, rel=0.02)


def test_workers_map_the_region_in_huge_pages(demo_result):
    assert len(demo_result.shared.page_sizes) == 2
    assert set(demo_result.shared.page_sizes.values()) == {2 * MIB}


def test_every_page_is_free_again_after_the_pool_is_deleted(demo_result):
    assert demo_result.summary.hugepages_free_after == demo_result.summary.hugepages_free_before


def test_the_figures_of_the_pages_are_those_of_this_run(demo_result):
    summary = demo_result.summary
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    ((cached, asked),) = re.findall(r"(\d+) of (\d+) prompt tokens come from the cache on server B's", readme)
    assert int(cached) == summary.cached_tokens_first_request_b
    assert {int(asked)} == {len(prompt) for prompt in demo_prompts()}
    ((chunks, plain),) = re.findall(r"([\d,]+) chunks fit where the plain layout holds ([\d,]+),", readme)
    assert int(chunks.replace(",", "")) == summary.capacity_chunks
    assert int(plain.replace(",", "")) == summary.plain_layout_capacity_chunks
    examples = (REPOSITORY / "examples/README.md").read_text()
    assert f"0, then {summary.cached_tokens_first_request_b} from B, which had never seen it" in examples


def test_the_summary_file_holds_exactly_the_promised_figures(demo_result):
    written = json.loads((OUTPUT / "summary.json").read_text())
    assert set(written) == SUMMARY_KEYS
    assert written == asdict(demo_result.summary)
