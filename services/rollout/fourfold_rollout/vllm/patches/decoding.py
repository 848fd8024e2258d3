"""Steps in which samples do nothing but decode, without vLLM's general way through the scheduler.

Almost every step of a rollout gives each running sample one token, and takes one from each. vLLM's scheduler walks the
same two hundred lines for it as for prompts in pieces, drafts, images and grammars. Here the samples that need none of
that are taken out of the step, advanced by two short loops, and put back; everything else about the step, and
every sample that is not as simple (a first or a last token, a preemption, a grammar), is vLLM's own code as before:

    schedule            all running samples decode, none waits    vLLM schedules nothing, our loop fills the step
    update_from_output  a sample's token cannot be its last       our loop takes it, vLLM takes the others

What is scheduled and given out stays the same, but for the order of a step's outputs;
tests/integration/test_scheduler.py compares every step.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

_CLIENT: Final = 0  # the service has one: vLLM numbers the processes that give it requests
# Parts of vLLM that look at every sample of a step, where they are configured; not all versions have each.
_LOOKERS_ON: Final = (
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
# What a step's output has only for samples that want more than tokens; likewise.
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


class EndConditions(NamedTuple):
    """What may end a sample about which there is nothing to know but its tokens."""

    stops: frozenset[int]
    """Tokens that end it, or do once it is long enough."""
    total: int
    """Tokens of its prompt and the most that it may sample."""
    length: int
    """Tokens at which it ends: `total`, or the model's context where that is shorter."""


def obstacle(scheduler: Scheduler) -> str:
    """Return what is configured that every step has to know of, for people; empty: nothing.

    Raises:
        AttributeError: another scheduler than those that this was written for.
    """
    for name in _LOOKERS_ON:
        if getattr(scheduler, name, None):
            return f"vLLM's {name} is in use"
    if scheduler.num_sampled_tokens_per_step != 1:
        return f"a step samples {scheduler.num_sampled_tokens_per_step} tokens of a sample"
    _ = scheduler.get_request_counts, scheduler.pause_state, scheduler.prev_step_scheduled_req_ids
    return ""


class DecodingScheduler(Scheduler):
    """Two loops for samples that decode; stands before one of vLLM's schedulers among the bases of a class."""

    decodes = False
    """Whether the loops are used: whoever makes it has looked at `obstacle`."""
    ahead = 0
    """1: asynchronous, a step is scheduled before the tokens of the one before have come."""

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        """Say what the GPU computes next."""
        decoding = self._decoding() if self.decodes else None
        if decoding is None:
            return super().schedule(*arguments, **options)
        rows = self._advance(decoding)
        # Nothing waits: what vLLM would admit now, it would put into a list that nobody keeps.
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
        """Take what the GPU sampled; return outputs by client."""
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
        """Return the samples whose next step is one token each, or None where vLLM has to plan the step."""
        running, longest = self.running, self.max_model_len
        waits = self.get_request_counts()[1] > 0 or self.pause_state is PauseState.PAUSED_ALL
        free = min(self.max_num_scheduled_tokens, self.kv_cache_manager.block_pool.get_num_free_blocks())
        if waits or not running or len(running) > free:
            return None
        decoding = []
        for request in running:
            limits, computed = _limits(request, longest), request.num_computed_tokens
            in_flight = request.num_output_placeholders
            if limits is None:
                return None
            if in_flight > 0 and computed + 2 - in_flight >= limits.total:
                continue  # its last token is on the way
            if len(request._all_token_ids) + in_flight - computed != 1 or request.is_prefill_chunk:
                return None
            if computed + 1 < longest:
                decoding.append(request)
            elif computed + 1 > longest:
                return None
        return decoding

    def _advance(self, decoding: list[Request]) -> _Rows:
        """Give each its slot, and count its token as computed."""
        rows = _Rows([], [], [], [])
        ahead = self.ahead
        allocate, size = self.kv_cache_manager.allocate_slots, self.kv_cache_manager.block_pool.hash_block_size
        for request in decoding:
            computed, blocks = request.num_computed_tokens, None
            # Only where a block is full, or the tokens of one are known, has the block manager anything to do.
            if computed % size == 0 or len(request._all_token_ids) % size == 0:
                new = allocate(request, 1, num_lookahead_tokens=0)
                if new is None:
                    # There were enough blocks for all. Should vLLM keep some back, it decides from now on who yields.
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
        """Put `rows` into a step that has none; `before` has the names of the step before, for the first runner."""
        names = [request.request_id for request in rows.requests]
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        cached = step.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = names, rows.blocks
        cached.num_computed_tokens, cached.num_output_tokens = rows.computed, rows.sampled
        if step.num_common_prefix_blocks:  # empty in later versions, which have no use for it
            first = self.running[0].request_id
            step.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(first)
        if not self.use_v2_model_runner:
            # The first runner is told all tokens of a sample that was not in the step before.
            self.prev_step_scheduled_req_ids = set(names)
            for request in rows.requests:
                if request.request_id not in before:
                    cached.all_token_ids[request.request_id] = request._all_token_ids.copy()

    def _take(
        self, scheduled: dict[str, int], sampled: ModelRunnerOutput
    ) -> tuple[list[EngineCoreOutput], dict[str, int]]:
        """Take the tokens that cannot be a sample's last; return their outputs, and what is left of `scheduled`."""
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
            limits = _limits(request, longest)
            if limits is None or len(tokens) != 1 or length >= limits.length or tokens[0] in limits.stops:
                left[name] = count
                continue
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= ahead
            if length % size == 0:
                request.update_block_hashes()
            if ahead and (length - 1) % size == 0:  # all but the last one are computed
                cache(request, request.num_computed_tokens - request.num_output_placeholders)
            taken.append(EngineCoreOutput(name, tokens))
        return taken, left


class _Rows(NamedTuple):
    """A step's samples, each at the same place of all lists."""

    requests: list[Request]
    blocks: list[tuple[list[int], ...] | None]
    """Ids of new blocks; None: none."""
    computed: list[int]
    """Tokens computed before the step."""
    sampled: list[int]
    """Tokens sampled before the step, with those on the way."""


def _is_plain(request: Request) -> bool:
    """Whether vLLM would add nothing to its token, and none is on the way from before a preemption."""
    return request.prefill_stats is None and request.num_preemptions == 0


def _limits(request: Request, longest: int) -> EndConditions | None:
    """Return what may end it, or None if it wants more than tokens; found once, and kept with it."""
    known: Any = vars(request)
    try:
        found: EndConditions | None = known["fourfold_limits"]
    except KeyError:
        found = known["fourfold_limits"] = find_limits(request, longest)
    return found


def find_limits(request: Request, longest: int) -> EndConditions | None:
    """Return what may end a sample, or None if it wants more than tokens.

    Args:
        request: vLLM's.
        longest: tokens of the model's context.
    """
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
