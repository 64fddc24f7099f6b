"""Bugs to plant in the worker's fencing and in the scheduler."""

from __future__ import annotations

from simulator.mutant import mutant

MACHINE = "scheduler_svc.core.machine"
POLICY = "scheduler_svc.core.policy"
PLANNER = "scheduler_svc.core.planner"
STEPPER = "scheduler_svc.core.stepper"
ADOPTION = "scheduler_svc.core.adoption"
DELIVERY = "scheduler_svc.core.delivery"
MIRROR = "scheduler_svc.core.worker_mirror"
OUTCOME = "scheduler_svc.core.step_outcome"
SEQUENCE = "scheduler_svc.core.sequence"
FENCING = "model_worker.fencing"

SCHEDULER_MUTANTS = (
    # The worker.
    mutant(
        "the worker checks no epoch",
        (FENCING, "if fence.epoch < newest.epoch:", "if False:"),
        (FENCING, "        return fence.epoch > newest.epoch", "        return fence != newest"),
    ),
    mutant(
        "the worker checks no boot id of its own",
        (FENCING, "if fence.worker_boot_id != self.worker_boot_id:", "if False:"),
    ),
    # The scheduler.
    mutant(
        "tokens are shown before kvmem has them",
        (
            STEPPER,
            "            self.outbox.add(outcome.commit, lambda _: self._on_committed(standing))\n",
            "            self.outbox.add(outcome.commit)\n"
            "            self._on_committed(standing)\n",
        ),
    ),
    mutant(
        "a resumed candidate does not wait for its prefix",
        (PLANNER, "return source.num_scheduled_tokens + in_step >=", "return True or in_step >="),
    ),
    mutant(
        "preemption splits a group",
        (
            STEPPER,
            "self.outbox.add(ops.Preempt(_ids(group)))\n"
            "            for sequence in group.live:\n                sequence.forget_blocks()",
            "self.outbox.add(ops.Preempt(_ids(group)[:1]))\n"
            "            for sequence in group.live:\n                sequence.forget_blocks()",
        ),
    ),
    mutant(
        "an abort forgets a candidate",
        (STEPPER, "        self.free(live)\n", "        self.free(live[:1])\n"),
    ),
    mutant(
        "no reserve after a fork",
        (
            STEPPER,
            "            sequence.num_writable_slots = sequence.num_computed_tokens\n",
            "            sequence.num_writable_slots = (\n"
            "                len(sequence.block_table) * self.block_size\n            )\n",
        ),
    ),
    mutant(
        "table deltas are sent twice",
        (
            MIRROR,
            "self._deltas, self._copies, self._dropped = [], [], []\n        self._swap_ins",
            "self._copies, self._dropped = [], []\n        self._swap_ins",
        ),
    ),
    mutant(
        "copies of a preempted group are made",
        (MIRROR, "if self._holds(c[0], c[2])]", "]"),
    ),
    mutant(
        "the worker is not told whom to forget",
        (MIRROR, "self._dropped.append(sequence.sequence_id)", "pass"),
    ),
    mutant(
        "step numbers begin again with each session",
        (
            STEPPER,
            "self._last_step_id = self._acknowledged_step = connected.last_step_id",
            "self._last_step_id = self._acknowledged_step = 0",
        ),
    ),
    mutant(
        "one is ended for want of blocks that an abort gives back",
        (STEPPER, "if not self.outbox.holds(ops.Free, ops.Fork, ops.Preempt):", "if True:"),
    ),
    mutant(
        "what is in flight is committed as computed",
        (
            OUTCOME,
            "np.array([sequence.num_computed_tokens for",
            "np.array([sequence.num_scheduled_tokens for",
        ),
    ),
    mutant(
        "a step has a token too many",
        (
            PLANNER,
            "num_tokens = min(sequence.num_unscheduled_tokens, tokens_left)",
            "num_tokens = min(sequence.num_unscheduled_tokens, tokens_left + 1)",
        ),
    ),
    mutant(
        "a group too many is admitted",
        (PLANNER, "group.num_seats > seats or", "seats <= 0 or"),
    ),
    mutant(
        "a step ahead computes a spare token",
        (
            SEQUENCE,
            "self.num_inflight_draws >= params.max_tokens",
            "self.num_inflight_draws > params.max_tokens",
        ),
    ),
    mutant(
        "a step runs ahead of a fork",
        (SEQUENCE, "return is_last or not self.group.forked", "return is_last"),
    ),
    mutant(
        "what was found is computed again",
        (
            MIRROR,
            "table.num_computed_tokens, 0 if is_first else num_shared_tokens",
            "0, 0 if is_first else num_shared_tokens",
        ),
    ),
    mutant(
        "priorities count for nothing",
        (POLICY, "number - group.request.priority * ARRIVALS_PER_PRIORITY", "number"),
    ),
    mutant(
        "the first in turn gives way",
        (POLICY, "return max(running, key=turn)", "return min(running, key=turn)"),
    ),
    mutant(
        "whoever fits is admitted, whoever waits",
        (
            PLANNER,
            "needed + spare > free:\n                break",
            "needed + spare > free:\n                continue",
        ),
    ),
    mutant(
        "one prompt is computed twice in a step",
        (PLANNER, "if not is_swapped and under_way.will_serve(group):", "if False:"),
    ),
    mutant(
        "a step with nothing but swaps is not executed",
        (STEPPER, "if rows or step.swap_ins or step.swap_outs:", "if rows:"),
    ),
    mutant(
        "a swap is made again with the next step",
        (
            MIRROR,
            "        self._swap_ins, self._swap_outs = [], []\n        return step, rows",
            "        self._swap_ins = []\n        return step, rows",
        ),
    ),
    # The scheduler, taking over.
    mutant(
        "swaps that a former session planned are not made",
        (
            STEPPER,
            "self.mirror.take_swaps(connected.pending_swap_ins, connected.pending_swap_outs)",
            "pass",
        ),
    ),
    mutant(
        "a result that was kept is committed twice",
        (
            ADOPTION,
            "            sequence.num_computed_tokens == num_computed_tokens\n            and left",
            "            left",
        ),
    ),
    mutant(
        "copies that a former session planned are not made",
        (STEPPER, "self.mirror.take_pending_copies(connected.pending_copies)", "pass"),
    ),
    mutant(
        "an adopted candidate writes where its sibling does",
        (
            ADOPTION,
            "return max(end * block_size, sequence.num_computed_tokens)",
            "return len(sequence.block_table) * block_size",
        ),
    ),
    mutant(
        "an adopted candidate does not wait for its prefix",
        (ADOPTION, "    find_prefix_sources(group.live, block_size)\n", ""),
    ),
    mutant(
        "an adopted candidate that has ended keeps its blocks",
        (MACHINE, "        stepper.free(unfreed)\n", ""),
    ),
    mutant(
        "sums of log-probabilities die with their scheduler",
        (ADOPTION, "_logprob_of(adopted.state_word)", "0.0"),
    ),
    mutant(
        "what was not committed is entered again",
        (ADOPTION, "output_token_ids[: sequence.num_committed_tokens]", "output_token_ids"),
    ),
    mutant(
        "a candidate is forgotten when its request is entered again",
        (
            ADOPTION,
            "        for sequence in group.sequences\n",
            "        for sequence in group.sequences[:1]\n",
        ),
        (
            ADOPTION,
            "return len(candidates) == request.params.n and all(",
            "return bool(candidates) and all(",
        ),
    ),
    mutant(
        "the first to attach stays",
        (
            DELIVERY,
            "self._by_request[request_id] = Recipient(received)",
            "self._by_request.setdefault(request_id, Recipient(received))",
        ),
    ),
    mutant(
        "a caller who comes back is told everything again",
        (DELIVERY, "{index: len(had.token_ids) for index, had in received.items()}", "{}"),
    ),
    mutant(
        "a request whose caller does not come is announced to nobody",
        (
            MACHINE,
            "                self._commands.append(events.Adopted(request_id))\n",
            "                pass\n",
        ),
    ),
)
