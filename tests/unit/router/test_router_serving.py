"""What a client sees of requests that go well."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from router_fleet import EOS, Fleet, finish_of, text_of

from transport.messages import Cancel, Decode, Prefill, Reserve


async def test_completion(fleet: Fleet) -> None:
    await fleet.start()
    response = await fleet.complete("say a", max_tokens=5)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "bcdef", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    await fleet.until_idle()


async def test_completion_stream(fleet: Fleet) -> None:
    await fleet.start()
    events = await fleet.events("say a", max_tokens=5)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert text_of(events) == "bcdef"
    assert finish_of(events) == ["length"]
    assert [c["text"] for e in events[:-1] for c in e["choices"]] == ["b", "c", "d", "e", "f"]
    assert all("usage" not in e for e in events[:-1])


async def test_chat(fleet: Fleet) -> None:
    await fleet.start()
    answer = (await fleet.chat("say a", max_tokens=3)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    [prefill] = fleet.prefill[0].seen(Prefill)
    assert list(prefill.token_ids) == fleet.ids("<|user|>say a\n<|assistant|>")


async def test_chat_stream_begins_with_the_role(fleet: Fleet) -> None:
    await fleet.start()
    messages = [{"role": "user", "content": "say a"}]
    events = await fleet.events(path="/v1/chat/completions", messages=messages, max_tokens=2)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "ab"
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events[:-1]}) == 1


async def test_text_parts_and_the_developer_role(fleet: Fleet) -> None:
    await fleet.start()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "say"}, {"type": "text", "text": "a"}]},
    ]
    response = await fleet.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200
    [prefill] = fleet.prefill[0].seen(Prefill)
    assert list(prefill.token_ids) == fleet.ids("<|system|>be brief\n<|user|>say\na\n<|assistant|>")


async def test_without_max_tokens(fleet: Fleet) -> None:
    """A chat goes on to the end of the context; a completion takes the API's 16."""
    await fleet.start()
    usage = (await fleet.chat("say a", max_tokens=None)).json()["usage"]
    assert usage["total_tokens"] == 512
    assert (await fleet.complete("say a", max_tokens=None)).json()["usage"]["completion_tokens"] == 16


async def test_without_max_tokens_in_a_small_pool(fleet: Fleet) -> None:
    """What fits is asked for: a default never makes a request impossible."""
    fleet.decode.clear()
    fleet.add_decode(num_blocks=2, block_size=32)
    await fleet.start()
    answer = (await fleet.chat("say a", max_tokens=None)).json()
    assert answer["usage"]["total_tokens"] == 64
    assert (await fleet.chat("say a", max_tokens=60)).json()["error"]["code"] == "context_length_exceeded"


async def test_case_59_max_completion_tokens_reaches_both_workers(fleet: Fleet) -> None:
    await fleet.start()
    answer = (await fleet.chat("say a", max_tokens=None, max_completion_tokens=3)).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert [p.sampling.max_tokens for p in fleet.prefill[0].seen(Prefill)] == [3]
    assert [r.max_tokens for r in fleet.decode[0].seen(Reserve)] == [3]
    assert (await fleet.chat("say a", max_tokens=9, max_completion_tokens=2)).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_case_39_and_m6_one_token_never_touches_decode(fleet: Fleet, stream: bool) -> None:
    await fleet.start()
    if stream:
        events = await fleet.events("say a", max_tokens=1)
        assert (text_of(events), finish_of(events), events[-1]) == ("b", ["length"], "[DONE]")
    else:
        answer = (await fleet.complete("say a", max_tokens=1)).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("b", 1)
    assert fleet.decode[0].received == []
    assert fleet.prefill[0].seen(Prefill)[0].lease is None
    assert fleet.prefill[0].seen(Cancel) == []
    await fleet.until_idle()


async def test_case_39_one_token_needs_no_decode_worker(model_dir: Any) -> None:
    fleet = Fleet(model_dir)
    fleet.add_prefill()
    await fleet.start(wait=False)
    await fleet.until(lambda: fleet.router.registry.prefill[0].usable)
    assert (await fleet.complete("say a", max_tokens=1)).json()["choices"][0]["text"] == "b"
    assert (await fleet.complete("say a", max_tokens=2)).status_code == 503
    await fleet.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_41_eos_as_the_first_token(fleet: Fleet, stream: bool) -> None:
    """finish_reason stop, no text, one [DONE]; D's lease is given back and decode never starts."""
    for worker in (*fleet.prefill, *fleet.decode):
        worker.successor, worker.eos = (lambda _: EOS), frozenset({EOS})
    await fleet.start()
    if stream:
        events = await fleet.events("say a")
        assert (text_of(events), finish_of(events), events.count("[DONE]")) == ("", ["stop"], 1)
    else:
        answer = (await fleet.complete("say a")).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 1
    await fleet.decode[0].until_seen(Cancel)
    assert fleet.decode[0].seen(Decode) == []
    await fleet.until_idle()


async def test_case_41_ignore_eos_is_honoured(fleet: Fleet) -> None:
    for worker in (*fleet.prefill, *fleet.decode):
        worker.successor, worker.eos = (lambda _: EOS), frozenset({EOS})
    await fleet.start()
    answer = (await fleet.complete("say a", ignore_eos=True, max_tokens=3)).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == ""
    shown = (await fleet.complete("say a", ignore_eos=True, max_tokens=3, skip_special_tokens=False)).json()
    assert shown["choices"][0]["text"] == "<eos>" * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_case_42_a_stop_string_in_the_first_token(fleet: Fleet, stream: bool) -> None:
    """P knows no stop strings: the router ends the request, on both sides, before decode starts."""
    fleet.prefill[0].push_gate.clear()
    await fleet.start()
    if stream:
        events = await fleet.events("say a", stop="b")
        assert (text_of(events), finish_of(events), events[-1]) == ("", ["stop"], "[DONE]")
    else:
        choice = (await fleet.complete("say a", stop="b")).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    await fleet.until_idle()
    assert fleet.decode[0].seen(Decode) == []
    assert len(fleet.decode[0].seen(Cancel)) == len(fleet.prefill[0].seen(Cancel)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_case_50_stop_across_the_hand_over(fleet: Fleet, stream: bool) -> None:
    """A stop string that begins in P's token and ends in D's; the text before it is complete, the row ends."""
    fleet.decode[0].step_s = 0.005
    await fleet.start()
    if stream:
        events = await fleet.events("say a", stop=["xyz", "de"], max_tokens=200)
        text, finish = text_of(events), finish_of(events)
    else:
        choice = (await fleet.complete("say a", stop=["xyz", "de"], max_tokens=200)).json()["choices"][0]
        text, finish = choice["text"], [choice["finish_reason"]]
    assert (text, finish) == ("bc", ["stop"])
    await fleet.decode[0].until_seen(Cancel)
    await fleet.until_idle()


async def test_stop_token_ids(fleet: Fleet) -> None:
    await fleet.start()
    answer = (await fleet.complete("say a", stop_token_ids=fleet.ids("d"), max_tokens=9)).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("bc", "stop")
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_case_45_cached_tokens(fleet: Fleet, stream: bool) -> None:
    """What P says it reused, and never more than the prompt; in streams too."""
    await fleet.start()
    for claimed, shown in ((3, 3), (500, 5)):
        fleet.prefill[0].cached_tokens = claimed
        if stream:
            events = await fleet.events("say a", stream_options={"include_usage": True})
            assert [e["usage"] for e in events[:-2]] == [None] * (len(events) - 2)
            assert events[-2]["choices"] == []
            usage = events[-2]["usage"]
        else:
            usage = (await fleet.complete("say a")).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": shown}
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)


async def test_case_43_logprobs_of_every_token(fleet: Fleet) -> None:
    """N entries for N tokens, the handed-over one included, whole and streamed, in both shapes."""
    await fleet.start()
    logprobs = (await fleet.complete("say a", logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["b", "c", "d", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    content = (await fleet.chat("say a", logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c", "d"]
    assert [entry["bytes"] for entry in content] == [[97], [98], [99], [100]]
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    events = await fleet.events("say a", logprobs=0, stop="de", max_tokens=9)
    shown = [t for e in events[:-1] for t in e["choices"][0]["logprobs"]["tokens"]]
    assert shown == ["b", "c", "d", "e"]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_48_n_choices_are_each_complete(fleet: Fleet, stream: bool) -> None:
    await fleet.start()
    if stream:
        events = await fleet.events("say a", n=3, seed=7, stream_options={"include_usage": True})
        assert [text_of(events, i) for i in range(3)] == ["bcde"] * 3
        assert [finish_of(events, i) for i in range(3)] == [["length"]] * 3
        usage = events[-2]["usage"]
    else:
        answer = (await fleet.complete("say a", n=3, seed=7)).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "bcde"), (1, "bcde"), (2, "bcde")]
        usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    prefills = fleet.prefill[0].seen(Prefill)
    assert sorted(p.sampling.seed or 0 for p in prefills) == [7, 8, 9]
    assert len({p.lease.id for p in prefills if p.lease}) == 3


async def test_lists_of_prompts(fleet: Fleet) -> None:
    await fleet.start()
    answer = (await fleet.complete(["say a", "say x"], n=2, echo=True)).json()  # type: ignore[arg-type]
    assert [c["text"] for c in answer["choices"]] == ["say abcde"] * 2 + ["say xyzab"] * 2
    assert answer["usage"]["prompt_tokens"] == 10
    ids = [fleet.ids("say a"), fleet.ids("q")]
    answer = (await fleet.complete(ids)).json()  # type: ignore[arg-type]
    assert [c["text"] for c in answer["choices"]] == ["bcde", "rstu"]
    answer = (await fleet.complete(fleet.ids("m"))).json()  # type: ignore[arg-type]
    assert [c["text"] for c in answer["choices"]] == ["nopq"]


async def test_echo_in_a_stream(fleet: Fleet) -> None:
    await fleet.start()
    assert text_of(await fleet.events("say a", echo=True)) == "say abcde"


async def test_case_69_a_prompt_is_tokenised_once(fleet: Fleet) -> None:
    """Whatever happens to the request: both endpoints, a retry, several choices."""
    await fleet.start()
    assert fleet.router.tokenizer.calls == 0
    await fleet.complete("say a")
    assert fleet.router.tokenizer.calls == 1
    await fleet.chat("say a")
    assert fleet.router.tokenizer.calls == 2
    await fleet.complete("say a", n=3)
    assert fleet.router.tokenizer.calls == 3
    fleet.decode[0].preempt = 1
    await fleet.complete("say a")
    assert fleet.router.tokenizer.calls == 4
    assert await fleet.metric("hawk_router_tokenised_texts_total") == 4


async def test_case_55_and_56_token_by_token(fleet: Fleet) -> None:
    """The first token is at the client while the push still runs; each step's token comes before the next step."""
    fleet.prefill[0].push_gate.clear()
    fleet.decode[0].steps.clear()
    await fleet.start()
    body = fleet.body("say a", stream=True, max_tokens=3)
    async with fleet.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line async for line in response.aiter_lines() if line)
        assert '"text":"b"' in await anext(lines)
        await fleet.decode[0].until(lambda: bool(fleet.decode[0].rows))
        for letter in "cd":
            await fleet.decode[0].step()
            assert f'"text":"{letter}"' in await anext(lines)
        assert await anext(lines) == "data: [DONE]"
    fleet.prefill[0].push_gate.set()
    fleet.decode[0].steps.set()
    await fleet.until_idle()


async def test_case_61_content_types(fleet: Fleet) -> None:
    await fleet.start()
    assert (await fleet.complete()).headers["content-type"] == "application/json"
    assert (await fleet.complete(max_tokens=-1)).headers["content-type"] == "application/json"
    async with fleet.http.stream("POST", "/v1/completions", json=fleet.body(stream=True)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        await response.aread()


async def test_characters_are_never_split(fleet: Fleet) -> None:
    """A character of several tokens comes whole or, cut off by max_tokens, not at all."""
    say = fleet.ids("aé🎉")
    following = dict(itertools.pairwise(say))
    for worker in (*fleet.prefill, *fleet.decode):
        worker.successor = lambda token: following[token]
    await fleet.start()
    for max_tokens, text in ((1, ""), (2, "é"), (3, "é"), (5, "é"), (6, "é🎉")):
        events = await fleet.events("say a", max_tokens=max_tokens)
        assert text_of(events) == text
        assert (await fleet.complete("say a", max_tokens=max_tokens)).json()["choices"][0]["text"] == text


async def test_models(fleet: Fleet) -> None:
    await fleet.start()
    [card] = (await fleet.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("alphabet", "model", 512)
    assert (await fleet.http.get("/v1/models/alphabet")).json() == card
    assert (await fleet.http.get("/v1/models/other")).status_code == 404
