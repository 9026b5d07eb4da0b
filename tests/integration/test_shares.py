"""The real start-up without Ray: numbers of the command line become pools at the engines, and the registry knows."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from integration.owners import (
    CONTEXT,
    DP_ATTENTION,
    ENDLESS,
    KV_TOKENS,
    PURE_DP,
    SOON_S,
    TOKEN,
    WAIT_S,
    TokenPrompt,
    first_of,
    idle,
    ids_of,
    opened,
    until,
)
from pomona.cluster.capacity import Limits
from pomona.cluster.membership import OwnerKey
from pomona.cluster.topology import Topology
from pomona.v1 import registry_pb2, telemetry_pb2
from pomona.workers import rpc

pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- shares: from the command line's numbers to pools at the engine -------------------------------------------


async def test_pure_dp_keeps_the_full_limit_on_each_of_four_replicas(models):
    async with opened(PURE_DP, Limits(8)) as bench:
        bench.start_all(models["llama"])
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.max_running_requests for load in loads] == [8, 8, 8, 8]
        assert [load.kv_tokens.capacity for load in loads] == [KV_TOKENS] * 4
        owners = bench.in_the_view()
        assert [o["max_running_requests"] for o in owners] == [8, 8, 8, 8]
        assert [o["pools"]["request_slots"]["capacity"] for o in owners] == [8, 8, 8, 8]
        assert [(o["replica"], o["owner"]) for o in owners] == [(r, 0) for r in range(4)]
        assert bench.cluster.plan().unallocated == 0


async def test_dp_attention_splits_8_into_2_2_2_2_once_the_last_owner_has_come(models):
    async with opened(DP_ATTENTION, Limits(8)) as bench:
        for owner in (3, 1, 0):
            bench.start(models["llama"], owner=owner)
        await until(lambda: len(bench.cluster.members.all()) == 3)
        early = await bench.client(bench.workers[0])
        assert (await early.load()).max_running_requests == 0
        assert not await early.healthy()
        refused = await early.refusal()
        assert (refused.code(), refused.details()) == (grpc.StatusCode.UNAVAILABLE, "this owner has no share yet")

        bench.start(models["llama"], owner=2)
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.max_running_requests for load in loads] == [2, 2, 2, 2]
        assert {load.epoch for load in loads} == {bench.cluster.epoch} == {1}
        owners = bench.in_the_view()
        assert [o["pools"]["request_slots"]["capacity"] for o in owners] == [2, 2, 2, 2]
        assert {o["phase"] for o in owners} == {"ready"}
        assert await early.healthy()


async def test_a_hybrid_splits_16_slots_into_4_each_and_runs_one_request_on_each(models):
    async with opened(DP_ATTENTION, Limits(8, 16)) as bench:
        bench.start_all(models["qwen3_next"])
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.aux_slots.capacity for load in loads] == [4, 4, 4, 4]
        assert [load.max_running_requests for load in loads] == [1, 1, 1, 1]
        plan = bench.cluster.view().to_json()
        assert plan["hybrid"] is True
        assert plan["unallocated_running_requests"] == 4
        assert [o["pools"]["aux_state_slots"]["capacity"] for o in plan["owners"]] == [4, 4, 4, 4]
        assert [o["bound"] for o in plan["owners"]] == ["aux"] * 4
        assert len(plan["warnings"]) == 4

        clients = [await bench.client(worker) for worker in bench.workers]
        answers = await asyncio.gather(*(c.answer(f"r{i}") for i, c in enumerate(clients)))
        ids = [ids_of(answer) for answer in answers]
        assert [len(one) for one in ids] == [24] * 4
        assert all(one == ids[0] for one in ids)  # four threads, one model: the same greedy answer
        call = clients[0].generate("held", ENDLESS)
        await first_of([call])
        held = await clients[0].load()
        assert (held.aux_slots.used, held.running_requests) == (4, 1)
        call.cancel()


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
async def test_a_hybrids_free_slots_hold_snapshots_from_which_the_next_turn_goes_on(models, kind):
    async with opened(limits=Limits(2, 8)) as keeping, opened(limits=Limits(2, 8)) as forgetting:
        keeping.start(models[kind])
        forgetting.start(models[kind], prefix_cache=False)
        await asyncio.gather(keeping.ready(), forgetting.ready())
        first = TokenPrompt(ids=range(300, 320))
        said, usages = [], []
        for bench in (keeping, forgetting):
            client = await bench.client(bench.workers[0])
            answer = ids_of(await client.answer("first", tokens=first))
            await client.load_until(idle, SOON_S)
            kept = (await client.load()).aux_slots.evictable
            next_turn = TokenPrompt(ids=[*first.ids, *answer, 5, 6, 7])
            after = await client.answer("next", tokens=next_turn)
            said.append(ids_of(after))
            usages.append((after[-1].usage.prompt_tokens, after[-1].usage.cached_tokens))
            assert (kept > 0) == (bench is keeping)
        assert said[0] == said[1]
        # The last token of an answer was never computed.
        assert usages == [(47, 43), (47, 0)]


async def test_15_slots_are_refused_in_the_units_of_the_command_line(models):
    async with opened(DP_ATTENTION, Limits(8, 15)) as bench:
        bench.start_all(models["lfm2"])
        await until(lambda: bench.cluster.refused)
        assert bench.cluster.refused is not None
        assert bench.cluster.refused.at_least == 16
        assert "--max-mamba-cache-size 15" in str(bench.cluster.refused)
        assert "use at least 16" in str(bench.cluster.refused)
        assert [load.max_running_requests for load in await bench.at_the_engines()] == [0, 0, 0, 0]
        assert bench.in_the_view() == []


# -- the registry ---------------------------------------------------------------------------------------------


async def test_workers_register_anew_with_a_registry_that_restarts_on_the_same_port_and_streams_go_on(models):
    async with opened(Topology(dp_size=2), Limits(8)) as bench:
        bench.start_all(models["llama"])
        await bench.ready()
        client = await bench.client(bench.workers[0])
        call = client.generate("goes on", ENDLESS)
        await first_of([call])
        known = {m.worker_id for m in bench.cluster.members.all()}
        await bench.close()
        await first_of([call])
        assert (await client.load()).running_requests == 1  # it serves while the head is away
        await bench.open(int(bench.address.rpartition(":")[2]))
        assert bench.cluster.members.all() == ()
        await bench.ready()
        assert {m.worker_id for m in bench.cluster.members.all()} == known
        assert [o["pools"]["request_slots"]["capacity"] for o in bench.in_the_view()] == [8, 8]
        assert bench.in_the_view()[0]["running_requests"] == 1
        await first_of([call])
        call.cancel()


async def test_head_restart_gives_shares_of_a_higher_epoch(models):
    async with opened() as bench:
        bench.start(models["llama"])
        await bench.ready()
        before = bench.cluster.epoch
        await bench.close()
        bench.limits = Limits(4)
        await bench.open(int(bench.address.rpartition(":")[2]))
        await bench.ready()
        assert bench.cluster.epoch > before
        client = await bench.client(bench.workers[0])
        await client.load_until(lambda load: load.max_running_requests == 4, WAIT_S)


async def test_a_worker_that_the_head_forgot_registers_anew_and_refuses_the_old_epoch(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        client = await bench.client(worker)
        old = bench.cluster.epoch
        assert (await client.answer("now", epoch=old))[-1].usage.completion_tokens == 24
        bench.cluster.lost(OwnerKey(0, 0))
        await until(bench.cluster.members.all)
        await client.load_until(lambda load: load.epoch == bench.cluster.epoch > old, WAIT_S)
        error = await client.refusal("old", epoch=old)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await client.answer("new", epoch=bench.cluster.epoch))[-1].usage.completion_tokens == 24


async def test_an_owner_that_drains_finishes_what_it_has_and_takes_nothing_new(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        client = await bench.client(worker)
        call = client.generate("before", ENDLESS)
        await first_of([call])
        bench.cluster.members.drain(OwnerKey(0, 0))
        error = None
        async with asyncio.timeout(WAIT_S):  # the next report, at most a second away, brings the word back
            while error is None:
                try:
                    await client.answer("after", max_tokens=1)
                except grpc.aio.AioRpcError as exc:
                    error = exc
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "this owner is draining")
        await first_of([call])
        assert bench.in_the_view()[0]["phase"] == "draining"
        call.cancel()


async def test_gateways_see_a_full_table_first_then_changes_and_who_left(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        stub = await bench.registry()
        watch = stub.WatchRoutes(registry_pb2.WatchRoutesRequest(model="M"), metadata=rpc.metadata(TOKEN))
        first = await asyncio.wait_for(watch.read(), WAIT_S)
        assert first.full
        (route,) = first.routes
        assert (route.address, route.phase) == (worker.address, telemetry_pb2.OWNER_PHASE_READY)
        assert (route.load.max_running_requests, route.context_tokens) == (8, CONTEXT)
        worker.stop()
        await asyncio.wait_for(bench.runs[0], WAIT_S)
        await stub.Deregister(
            registry_pb2.DeregisterRequest(worker_id=route.worker_id, incarnation=worker.incarnation),
            metadata=rpc.metadata(TOKEN),
        )
        async with asyncio.timeout(WAIT_S):
            while not (update := await watch.read()).removed_worker_ids:
                assert not update.full
        assert list(update.removed_worker_ids) == [route.worker_id]
        assert bench.cluster.members.all() == ()
        watch.cancel()


async def test_an_owner_that_nobody_wants_is_refused_and_never_counted():
    async with opened() as bench:
        stub = await bench.registry()
        for wrong in ({"model": "another"}, {"replica": 1}, {"owner": 1}):
            who = telemetry_pb2.WorkerIdentity(**({"model": "M", "incarnation": "x"} | wrong))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(registry_pb2.RegisterRequest(worker=who), metadata=rpc.metadata(TOKEN))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert bench.cluster.members.all() == ()
