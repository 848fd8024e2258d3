"""Schedules and completes the steps in which samples only decode, in two short loops instead of vLLM's scheduler.

In almost every step of a rollout each running sample gets one token. vLLM's scheduler runs the same two hundred lines
for it as for chunked prompts, drafts, images and grammars. Here the samples that need none of that are taken out of the
step, advanced by a short loop, and put back. vLLM's own code handles everything else: the rest of the step, and samples
with a first or last token, a preemption or a grammar.

    schedule            all running samples decode, none waits    vLLM schedules nothing, our loop fills the step
    update_from_output  the token cannot be the sample's last     our loop takes it, vLLM takes the others

The steps and the outputs are the same but for the order of a step's outputs; tests/integration/test_scheduler.py
compares every step.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

_CLIENT: Final = 0  # vLLM numbers the processes that send it requests; the service is the only one
# Features of vLLM that visit every sample of a step if they are configured. No version has all of them.
_UNSUPPORTED: Final = (
    "connector",
    "ec_connector",
    "aux_output_connector",
    "num_spec_tokens",
    "dynamic_sd_lookup",
    "use_pp",
    "is_encoder_decoder",
    "need_mamba_block_aligned_split",
    "needs_kv_cache_zeroing",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "perf_metrics",
)
# Fields of a step's output that are set only for samples that want more than tokens. No version has all of them.
_EXTRAS: Final = (
    "logprobs",
    "prompt_logprobs_dict",
    "prompt_token_id_logprobs_dict",
    "pooler_output",
    "kv_connector_output",
    "ec_connector_output",
    "aux_output_connector_output",
    "routed_experts",
    "sampling_masks",
    "num_nans_in_logits",
)
# What a preemption leaves in a request until its next output: the number of tokens that were being computed (vLLM 0.26,
# vLLM 0.32) and the event for the statistics.
_AFTER_PREEMPTION: Final = ("async_tokens_to_discard", "num_stale_output_tokens", "events")


class EndConditions(NamedTuple):
    """The conditions that end a sample which returns nothing but tokens."""

    stops: frozenset[int]  # tokens that end it, at once or after its `min_tokens`
    total: int  # prompt tokens plus `max_tokens`
    length: int  # the lesser of `total` and the model's context


def obstacle(scheduler: Scheduler) -> str:
    """Return the configured feature that the loops do not support; empty if there is none.

    Raises AttributeError: an unknown version of vLLM's scheduler.
    """
    for name in _UNSUPPORTED:
        if getattr(scheduler, name, None):
            return f"vLLM's {name} is in use"
    if scheduler.num_sampled_tokens_per_step != 1:
        return f"a step samples {scheduler.num_sampled_tokens_per_step} tokens of a sample"
    _ = scheduler.get_request_counts, scheduler.pause_state, scheduler.prev_step_scheduled_req_ids
    return ""


class DecodingScheduler(Scheduler):
    """The two loops, as a mixin before one of vLLM's schedulers."""

    decodes = False  # whether the loops are used; set it only if `obstacle` returns nothing
    ahead = 0  # 1: asynchronous scheduling, a step is scheduled before the tokens of the previous one are known

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        decoding = self._decoding() if self.decodes else None
        if decoding is None:
            return super().schedule(*arguments, **options)
        rows = self._advance(decoding)
        # Empty `running`, so that vLLM schedules nothing. No request waits, so vLLM adds none to the temporary list.
        running, self.running = self.running, []
        before, self.prev_step_scheduled_req_ids = self.prev_step_scheduled_req_ids, set()
        try:
            step = super().schedule(*arguments, **options)
        finally:
            self.running = running
        self._fill(step, rows, before)
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the tokens that the GPU sampled; return the outputs by client."""
        step, sampled = scheduler_output, model_runner_output
        if not self.decodes or not sampled.sampled_token_ids or any(getattr(sampled, name, None) for name in _EXTRAS):
            return super().update_from_output(step, sampled)
        whole = step.num_scheduled_tokens
        taken, step.num_scheduled_tokens = self._take(whole, sampled)
        try:
            outputs = super().update_from_output(step, sampled)
        finally:
            step.num_scheduled_tokens = whole
        if taken:
            if _CLIENT not in outputs:
                outputs[_CLIENT] = EngineCoreOutputs()
            outputs[_CLIENT].outputs = taken + outputs[_CLIENT].outputs
        return outputs

    def _decoding(self) -> list[Request] | None:
        """Return the samples whose next step is one token each, or None if vLLM must schedule the step."""
        running, longest = self.running, self.max_model_len
        waits = self.get_request_counts()[1] > 0 or self.pause_state is PauseState.PAUSED_ALL
        free = min(self.max_num_scheduled_tokens, self.kv_cache_manager.block_pool.get_num_free_blocks())
        if waits or not running or len(running) > free:
            return None
        decoding = []
        for request in running:
            limits, computed = _end_conditions(request, longest), request.num_computed_tokens
            in_flight = request.num_output_placeholders
            if limits is None:
                return None
            if in_flight > 0 and computed + 2 - in_flight >= limits.total:
                continue  # its last token is being computed
            if len(request._all_token_ids) + in_flight - computed != 1 or request.is_prefill_chunk:
                return None
            if computed + 1 < longest:
                decoding.append(request)
            elif computed + 1 > longest:
                return None
        return decoding

    def _advance(self, decoding: list[Request]) -> _Rows:
        """Allocate a cache slot for each sample and count its token as computed."""
        rows = _Rows([], [], [], [])
        ahead = self.ahead
        allocate, size = self.kv_cache_manager.allocate_slots, self.kv_cache_manager.block_pool.hash_block_size
        for request in decoding:
            computed, blocks = request.num_computed_tokens, None
            # The block manager has work only when a block is full, or when all tokens of a block are known.
            if computed % size == 0 or len(request._all_token_ids) % size == 0:
                new = allocate(request, 1, num_lookahead_tokens=0)
                if new is None:
                    # `_decoding` counted enough free blocks. If vLLM reserves some, it must choose what to preempt.
                    self.decodes = False
                    continue
                blocks = new.get_block_ids(allow_none=True)
            rows.requests.append(request)
            rows.blocks.append(blocks)
            rows.computed.append(computed)
            rows.sampled.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        return rows

    def _fill(self, step: SchedulerOutput, rows: _Rows, before: set[str]) -> None:
        """Put `rows` into an empty step; `before` has the request ids of the previous step, for the V1 runner."""
        names = [request.request_id for request in rows.requests]
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        cached = step.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = names, rows.blocks
        cached.num_computed_tokens, cached.num_output_tokens = rows.computed, rows.sampled
        if step.num_common_prefix_blocks:  # always empty in later versions
            first = self.running[0].request_id
            step.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(first)
        if not self.use_v2_model_runner:
            # The V1 runner needs all tokens of a sample that was not in the previous step.
            self.prev_step_scheduled_req_ids = set(names)
            for request in rows.requests:
                if request.request_id not in before:
                    cached.all_token_ids[request.request_id] = request._all_token_ids.copy()

    def _take(
        self, scheduled: dict[str, int], sampled: ModelRunnerOutput
    ) -> tuple[list[EngineCoreOutput], dict[str, int]]:
        """Take the tokens that cannot be a sample's last; return their outputs and the rest of `scheduled`."""
        taken, left = [], {}
        tokens_of, row_of, requests = sampled.sampled_token_ids, sampled.req_id_to_index, self.requests
        size, longest = self.kv_cache_manager.block_pool.hash_block_size, self.max_model_len
        cache, running, ahead = self.kv_cache_manager.cache_blocks, RequestStatus.RUNNING, self.ahead
        for name, count in scheduled.items():
            request = requests.get(name)
            if request is None or count != 1 or request.status is not running or not _is_plain(request):
                left[name] = count
                continue
            tokens, length = tokens_of[row_of[name]], len(request._all_token_ids) + 1
            limits = _end_conditions(request, longest)
            if limits is None or len(tokens) != 1 or length >= limits.length or tokens[0] in limits.stops:
                left[name] = count
                continue
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= ahead
            if length % size == 0:
                request.update_block_hashes()
            if ahead and (length - 1) % size == 0:  # the cache holds all tokens but the last
                cache(request, request.num_computed_tokens - request.num_output_placeholders)
            taken.append(EngineCoreOutput(name, tokens))
        return taken, left


class _Rows(NamedTuple):
    """The samples of a step, each at the same index of all lists."""

    requests: list[Request]
    blocks: list[tuple[list[int], ...] | None]  # ids of new blocks, or None
    computed: list[int]  # tokens computed before the step
    sampled: list[int]  # tokens sampled before the step, including those being computed


def _is_plain(request: Request) -> bool:
    """Return whether vLLM adds nothing to the token, and no token from before a preemption is outstanding."""
    if request.num_preemptions > 0:
        known = vars(request)
        if any(known.get(name) for name in _AFTER_PREEMPTION):
            return False
    return request.prefill_stats is None


def _end_conditions(request: Request, longest: int) -> EndConditions | None:
    """Return `find_end_conditions` of a request, cached in the request."""
    known: Any = vars(request)
    try:
        found: EndConditions | None = known["fourfold_limits"]
    except KeyError:
        found = known["fourfold_limits"] = find_end_conditions(request, longest)
    return found


def find_end_conditions(request: Request, longest: int) -> EndConditions | None:
    """Return the end conditions of a sample, or None if it returns more than tokens; `longest`: the model's context."""
    wanted: Any = request.sampling_params
    if (
        wanted is None
        or request.client_index != _CLIENT
        or request.use_structured_output
        or request.has_encoder_inputs
        or request.resumable
        or request.trace_headers is not None
        or wanted.repetition_detection is not None
    ):
        return None
    total = request.num_prompt_tokens + request.max_tokens
    stops = {wanted.eos_token_id, *(wanted.stop_token_ids or ())} - {None}
    return EndConditions(stops=frozenset(stops), total=total, length=min(total, longest))
