"""The engine thread: every answer arrives whole, in order, with its usage and its end."""

from dataclasses import replace

from engines import EOS, NOTHING, FakeText, ScriptedRunner, held, text_of
from pomona.workers.engine.base import (
    Chunk,
    Counters,
    Delta,
    FinishReason,
    Logprob,
    Piece,
    Sampling,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from pomona.workers.errors import Unavailable


def test_before_the_first_share_a_request_is_told_to_go_elsewhere(bench):
    b = bench()
    assert "no share" in str(b.refused("a", Unavailable))
    b.engine.start()
    assert "no share" in str(b.refused("a", Unavailable))
    assert (b.loads, b.runners) == ([], [])


def test_no_runner_is_made_before_the_first_step(bench):
    b = bench().start()
    b.share(epoch=2, requests=4)
    b.wait_next_load()
    assert b.runners == []
    b.submit("a", max_tokens=2)
    b.open()
    b.wait_last("a")
    b.submit("b", max_tokens=2)
    b.wait_last("b")
    assert len(b.runners) == 1


def test_an_answer_arrives_in_order_with_its_usage_and_its_end(bench):
    b = bench(scripts={"a": "hello"}).start()
    deltas = b.submit("a", prompt=4)
    b.open()
    b.wait_last("a")
    assert deltas == [
        *(Delta((ord(c),), c) for c in "hello"),
        Delta((EOS,), finish=FinishReason.STOP, usage=Usage(prompt_tokens=4, completion_tokens=6)),
    ]


def test_eos_adds_no_text_but_counts_as_a_token(bench):
    b = bench(scripts={"a": ""}).start()
    deltas = b.submit("a", prompt=4)
    b.open()
    b.wait_last("a")
    assert deltas == [Delta((EOS,), finish=FinishReason.STOP, usage=Usage(4, 1))]
    assert b.loads[-1].counters == Counters(finished_requests=1, prompt_tokens=4, generation_tokens=1)


def test_the_token_limit_ends_an_answer_with_length(bench):
    b = bench().start()
    deltas = b.submit("a", max_tokens=3)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish, deltas[-1].usage) == ("xxx", FinishReason.LENGTH, Usage(3, 3))


def test_answers_that_run_together_do_not_mix(bench):
    scripts = {"a": "first", "b": "second answer"}
    b = bench(scripts=scripts).start()
    for request_id in scripts:
        b.submit(request_id)
    b.open()
    b.wait_last("a", "b")
    assert {r: text_of(deltas) for r, deltas in b.answers.items()} == scripts


def test_log_probabilities_come_with_their_token(bench):
    b = bench().start()
    deltas = b.submit("a", max_tokens=1, sampling=Sampling(top_logprobs=1))
    b.open()
    b.wait_last("a")
    x = ord("x")
    assert deltas[0].logprobs == (TokenLogprobs(x, -0.5, (Logprob(x, -0.5),)),)


def test_a_snapshot_names_what_runs_what_waits_and_what_it_holds(bench):
    b = bench().start(epoch=7, requests=1)
    b.submit("a", prompt=3, max_tokens=10)
    b.submit("b")
    b.wait_plan(1)
    b.one_step()
    b.one_step()
    load = b.loads[-1]
    assert (load.epoch, load.running, load.waiting) == (7, 1, 1)
    assert (load.kv_tokens.used, load.aux_slots.used) == (13, 2)
    assert (load.active_bytes, load.limit_bytes) == (10, 100)


def test_an_idle_engine_still_shows_that_it_is_alive(bench):
    b = bench().start()
    b.wait_next_load()
    b.wait_next_load()
    assert b.publishers[-1] is b.engine._thread
    assert b.runners == []


def test_a_long_prompt_is_computed_by_chunks_before_the_first_token(bench):
    b = bench(chunk_tokens=16, scripts={"a": "hi"}).start()
    deltas = b.submit("a", prompt=100)
    assert b.wait_plan(1).prefill == (Chunk("a", 16),)
    assert b.one_step().prefill == (Chunk("a", 16),)
    assert b.one_step().prefill == (Chunk("a", 16),)
    assert deltas == []
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].usage) == ("hi", Usage(100, 3))
    assert b.loads[-1].counters.prompt_tokens == 100


def test_usage_says_how_much_of_the_prompt_was_reused(bench):
    b = bench(reused_tokens=4).start()
    deltas = b.submit("a", prompt=6, max_tokens=2)
    b.open()
    b.wait_last("a")
    assert deltas[-1].usage == Usage(prompt_tokens=6, completion_tokens=2, cached_tokens=4)
    assert b.loads[-1].counters.prompt_tokens == 2, "what was computed"


# -- pieces ----------------------------------------------------------------------------------------------------


class PieceText:
    """A piece a token; the last one is what was held back."""

    def __init__(self, *pieces):
        self._pieces = iter(pieces)

    def push(self, _):
        return next(self._pieces)

    def finish(self):
        return next(self._pieces)


ONE, TWO = ToolCall("id-1", "weather", '{"city": "Bern"}'), ToolCall("id-2", "clock", "{}")


def test_reasoning_and_tool_calls_reach_the_client_with_their_token(bench):
    pieces = (Piece(reasoning="hm"), Piece("look"), Piece(tool_calls=(ONE, TWO)), Piece())
    b = bench(scripts={"a": "123"}, new_text=lambda _: PieceText(*pieces)).start()
    deltas = b.submit("a")
    b.open()
    b.wait_last("a")
    assert deltas == [
        Delta((ord("1"),), reasoning="hm"),
        Delta((ord("2"),), "look"),
        Delta((ord("3"),), tool_calls=(ONE, TWO)),
        Delta((EOS,), finish=FinishReason.STOP, usage=Usage(3, 4)),
    ]


def test_what_the_last_token_says_and_what_was_held_back_arrive_together(bench):
    pieces = (Piece("a", "first", (ONE,)), Piece("b", "then", (TWO,)))
    b = bench(new_text=lambda _: PieceText(*pieces)).start()
    deltas = b.submit("a", max_tokens=1)
    b.open()
    b.wait_last("a")
    assert deltas == [Delta((ord("x"),), "ab", "firstthen", (ONE, TWO), finish=FinishReason.LENGTH, usage=Usage(3, 1))]


def test_a_text_never_sees_the_stop_token(bench):
    seen = []

    class Watched(FakeText):
        def push(self, token):
            seen.append(token)
            return super().push(token)

    b = bench(scripts={"a": "hi"}, new_text=Watched).start()
    b.submit("a")
    b.open()
    b.wait_last("a")
    assert seen == [ord("h"), ord("i")]


# -- stop strings ----------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_frees_its_pools_and_tells_the_runner(bench):
    b = bench(scripts={"a": "hello world"}).start()
    deltas = b.submit("a", stop=("lo",))
    b.wait_plan(1)
    for _ in range(4):
        assert b.one_step().leave == ()
    assert b.one_step().leave == ("a",)
    assert text_of(deltas) == "hel"
    assert (deltas[-1].finish, deltas[-1].usage) == (FinishReason.STOP, Usage(3, 5))
    load = b.loads[-1]
    assert held(load) == NOTHING
    assert load.counters.finished_requests == 1


def test_text_held_back_for_a_stop_string_goes_out_at_the_end(bench):
    b = bench(scripts={"eos": "help", "length": "help me"}).start()
    at_eos = b.submit("eos", stop=("pp",))
    at_length = b.submit("length", stop=("pp",), max_tokens=4)
    b.open()
    b.wait_last("eos", "length")
    assert (text_of(at_eos), at_eos[-1].text, at_eos[-1].finish) == ("help", "p", FinishReason.STOP)
    assert (text_of(at_length), at_length[-1].finish) == ("help", FinishReason.LENGTH)


def test_a_stop_string_met_by_the_last_token_is_a_stop_not_a_length(bench):
    b = bench(scripts={"a": "hello"}).start()
    deltas = b.submit("a", stop=("lo",), max_tokens=5)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish) == ("hel", FinishReason.STOP)


def test_a_stop_string_found_only_at_the_end_is_a_stop(bench):
    b = bench(scripts={"a": "xabc and more"}).start()
    deltas = b.submit("a", stop=("abcd", "bc"), max_tokens=4)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish) == ("xa", FinishReason.STOP)


def test_after_a_stop_string_nothing_comes_that_was_held_back(bench):
    b = bench(new_text=lambda _: PieceText(Piece("said", stopped=True), Piece("held back"))).start()
    deltas = b.submit("a", max_tokens=1)
    b.open()
    b.wait_last("a")
    assert deltas == [Delta((ord("x"),), "said", finish=FinishReason.STOP, usage=Usage(3, 1))]


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(bench, monkeypatch):
    one = ScriptedRunner.step

    def two_at_once(self, plan):
        result = one(self, plan)
        return replace(result, tokens=2 * result.tokens)

    monkeypatch.setattr(ScriptedRunner, "step", two_at_once)
    b = bench().start()
    deltas = b.submit("a", stop=("x",))
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish, deltas[-1].usage) == ("", FinishReason.STOP, Usage(3, 1))
