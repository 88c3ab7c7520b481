"""Responses that are stored, go on from others, or run in the background."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from forerun.core.errors import ConfigError
from forerun.server.http.errors import ApiError
from forerun.server.openai.response_store import RESPONSE, Entry, Limits, ResponseStore
from forerun.server.openai.stored_responses import item_page
from tests.server.scripted import Scripted
from tests.server.support import QUESTION, LiveServer, flags, wait_for
from tests.server.test_responses import TOOLS
from tests.server.test_tools import CITY, HERMES, PLAIN, QWEN3, THINK

ASK: Any = {"model": "bundled", "input": "Is it warm?"}
Client = openai.AsyncOpenAI


def test_a_response_goes_on_from_another() -> None:
    async def talk(client: Client) -> list[Any]:
        first = await client.responses.create(**ASK, tools=TOOLS, instructions="Be brief.")
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "20 °C"}
            for item in first.output
            if item.type == "function_call"
        ]
        more: Any = {"model": "bundled", "tools": TOOLS}
        second = await client.responses.create(**more, input=results, previous_response_id=first.id)
        stream = await client.responses.create(
            **more, input="And then?", previous_response_id=second.id, stream=True
        )
        events = [event async for event in stream]
        return [first, second, events[-1].response]

    scripted = Scripted(QWEN3, THINK + HERMES, "It is.", "No.")
    first, second, third = scripted.run(talk)
    assert [r.previous_response_id for r in (first, second, third)] == [None, first.id, second.id]
    assert all(response.store for response in (first, second, third))
    written = HERMES.replace('"now"}', '"now", "arguments": {}}')
    said = (
        f"<user>Is it warm?<|im_end|><assistant><think>The user asks.</think>{written}<|im_end|>"
        "<tool>20 °C<|im_end|><tool>20 °C<|im_end|><assistant>"
    )
    prompts = [prompt.partition("]<")[2] for prompt in scripted.engine.prompts]
    assert prompts[0] == "system>Be brief.<|im_end|><user>Is it warm?<|im_end|><assistant>"
    assert prompts[1] == said[1:]  # instructions are those of each request
    assert prompts[2] == f"{said[1:]}It is.<|im_end|><user>And then?<|im_end|><assistant>"


def test_the_prompt_is_that_of_the_whole_conversation() -> None:
    """What is stored gives the prompt that a client without a store would send."""

    async def stored(client: Client) -> None:
        first = await client.responses.create(**ASK)
        await client.responses.create(**{**ASK, "previous_response_id": first.id})

    async def sent(client: Client) -> None:
        first = await client.responses.create(**ASK, store=False)
        items: Any = [{"role": "user", "content": ASK["input"]}]
        items += [item.model_dump() for item in first.output] + items
        await client.responses.create(**{**ASK, "input": items}, store=False)

    prompts = []
    for talk in (stored, sent):
        scripted = Scripted(QWEN3, THINK + "Yes.", "Yes.")
        scripted.run(talk)
        prompts.append(scripted.engine.prompts[1])
    assert prompts[0] == prompts[1]


def test_what_is_stored_can_be_read_and_deleted() -> None:
    async def use(client: Client) -> None:
        first = await client.responses.create(**ASK, metadata={"a": "b"})
        assert await client.responses.retrieve(first.id) == first
        second = await client.responses.create(
            **{**ASK, "input": [{"role": "user", "content": "And now?"}]},
            previous_response_id=first.id,
        )
        listed = client.responses.input_items.list(second.id, order="asc", limit=2)
        items = [item async for item in listed]  # more than a page
        assert [item.role for item in items] == ["user", "assistant", "user"]
        assert items[0].content[0].text == ASK["input"]
        assert len({item.id for item in items}) == 3
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert newest.has_more and newest.data[0] == items[-1]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=r"There is no response"):
            await client.responses.retrieve(first.id)
        again = await client.responses.create(**{**ASK, "previous_response_id": second.id})
        assert again.output_text == "c"  # what was said stays with those that go on from it
        with pytest.raises(openai.BadRequestError, match="not the id of an item"):
            await client.responses.input_items.list(second.id, after="x")
        with pytest.raises(openai.BadRequestError, match="limit: input should be greater"):
            await client.responses.input_items.list(second.id, limit=0)

    Scripted(PLAIN, "a", "b", "c").run(use)


def test_what_is_not_stored_is_not_found() -> None:
    async def use(client: Client) -> None:
        response = await client.responses.create(**ASK, store=False)
        assert response.store is False
        for ident in (response.id, "resp_1", "../x", "a" * 4000):
            for call in (
                client.responses.retrieve(ident),
                client.responses.delete(ident),
                client.responses.cancel(ident),
                client.responses.input_items.list(ident),
                client.responses.create(**ASK, previous_response_id=ident),
                client.responses.create(**ASK, conversation=ident),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call

    Scripted(PLAIN, "a").run(use)


def test_a_key_sees_its_own_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\nbob b-key\n")

    async def use(client: Client) -> None:
        alice, bob = client.with_options(api_key="a-key"), client.with_options(api_key="b-key")
        response = await alice.responses.create(**ASK)
        conversation = await alice.conversations.create()
        for call in (
            bob.responses.retrieve(response.id),
            bob.responses.delete(response.id),
            bob.responses.cancel(response.id),
            bob.responses.input_items.list(response.id),
            bob.responses.create(**ASK, previous_response_id=response.id),
            bob.responses.create(**ASK, conversation=conversation.id),
            bob.conversations.retrieve(conversation.id),
            bob.conversations.items.list(conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await alice.responses.retrieve(response.id)).output_text == "a"
        # Another key's store is not full when this one's is.
        await alice.responses.create(**ASK, store=True)
        with pytest.raises(openai.BadRequestError, match="no room"):
            await alice.responses.create(**ASK, store=True)
        assert (await bob.responses.create(**ASK, store=True)).store

    Scripted(PLAIN, *"abc", api_key_file=str(keys), max_stored_responses=2).run(use)


def test_a_full_store() -> None:
    """What was asked for stays; the others make room, the oldest first."""

    async def use(client: Client) -> None:
        kept = await client.responses.create(**ASK, store=True)
        others = [await client.responses.create(**ASK) for _ in range(3)]
        assert all(response.store for response in others)
        with pytest.raises(openai.NotFoundError, match="made room for newer ones"):
            await client.responses.retrieve(others[0].id)
        assert (await client.responses.retrieve(others[2].id)).id == others[2].id
        more = [await client.responses.create(**ASK, store=True) for _ in range(2)]
        for body in ({"store": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="no room for it") as caught:
                await client.responses.create(**ASK, **body)
            assert caught.value.code == "store_full"
        with pytest.raises(openai.BadRequestError, match="no room for it"):
            await client.conversations.create()
        assert (await client.responses.create(**ASK)).store is False
        for response in (kept, *more):
            assert await client.responses.retrieve(response.id) == response
        await client.responses.delete(kept.id)
        assert (await client.responses.create(**ASK, store=True)).store

    Scripted(PLAIN, *"abcdefgh", max_stored_responses=3).run(use)


def test_a_store_of_few_bytes_and_none() -> None:
    async def use(client: Client) -> None:
        long = {**ASK, "input": "x" * 4000}
        assert (await client.responses.create(**long)).store is False
        with pytest.raises(openai.BadRequestError, match="no room"):
            await client.responses.create(**long, store=True)

    Scripted(PLAIN, "a", max_stored_bytes=4000).run(use)

    async def none(client: Client) -> None:
        response = await client.responses.create(**ASK)
        with pytest.raises(openai.NotFoundError, match="--max-stored-responses is 0"):
            await client.responses.retrieve(response.id)

    Scripted(PLAIN, "a", max_stored_responses=0).run(none)


def test_a_conversation() -> None:
    async def use(client: Client) -> None:
        item: Any = {"type": "message", "role": "user", "content": "I am Kim."}
        made = await client.conversations.create(items=[item], metadata={"a": "b"})
        assert made.object == "conversation" and made.metadata == {"a": "b"}
        first = await client.responses.create(**ASK, conversation=made.id)
        assert first.conversation is not None and first.conversation.id == made.id
        await client.responses.create(
            **{**ASK, "input": "And now?"}, conversation={"id": made.id}, store=False
        )
        listed = client.conversations.items.list(made.id, order="asc", limit=3)
        items: list[Any] = [item async for item in listed]
        texts = [item.content[0].text for item in items]
        assert texts == ["I am Kim.", ASK["input"], "Yes.", "And now?", "No."]
        one = await client.conversations.items.retrieve(items[2].id, conversation_id=made.id)
        assert one == items[2]
        await client.conversations.items.delete(items[2].id, conversation_id=made.id)
        added = await client.conversations.items.create(made.id, items=[item, item])
        assert len(added.data) == 2
        left = [item async for item in client.conversations.items.list(made.id)]
        assert len(left) == 6
        updated = await client.conversations.update(made.id, metadata={"c": "d"})
        assert updated.metadata == {"c": "d"}
        assert (await client.conversations.retrieve(made.id)).metadata == {"c": "d"}
        with pytest.raises(openai.BadRequestError, match="An item of input must be"):
            await client.conversations.items.create(made.id, items=[{"type": "x"}])  # type: ignore[list-item,typeddict-item]
        with pytest.raises(openai.BadRequestError, match="at most 20"):
            await client.conversations.items.create(made.id, items=[item] * 21)
        with pytest.raises(openai.NotFoundError, match="no item"):
            await client.conversations.items.delete("x", conversation_id=made.id)
        await client.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="There is no conversation"):
            await client.responses.create(**ASK, conversation=made.id)

    scripted = Scripted(PLAIN, "Yes.", "No.")
    scripted.run(use)
    assert scripted.engine.prompts[1] == (
        f"<user>I am Kim.<|im_end|><user>{ASK['input']}<|im_end|><assistant>Yes.<|im_end|>"
        "<user>And now?<|im_end|><assistant>"
    )


def test_a_background_response() -> None:
    async def use(client: Client) -> None:
        begun = await client.responses.create(**ASK, tools=TOOLS, background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        response = await ended(client, begun.id)
        assert response.status == "completed" and response.store
        assert [item.type for item in response.output] == [
            *("message", "function_call", "function_call"),
        ]
        assert response.output[1].arguments == CITY  # type: ignore[union-attr]
        assert await client.responses.cancel(begun.id) == response  # it has ended
        other = await client.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError, match="in the background can be cancelled"):
            await client.responses.cancel(other.id)

    Scripted(QWEN3, HERMES, "a").run(use)


def test_responses_that_run_have_their_place_in_the_store() -> None:
    """Of many that start at once no more than it can keep."""

    async def use(client: Client) -> None:
        starting = (client.responses.create(**ASK, background=True) for _ in range(6))
        begun = await asyncio.gather(*starting, return_exceptions=True)
        run = [each for each in begun if not isinstance(each, BaseException)]
        refused = [each for each in begun if isinstance(each, openai.BadRequestError)]
        assert (len(run), len(refused)) == (2, 4)
        assert all(each.code == "store_full" for each in refused)
        assert (await client.responses.create(**ASK)).store is False
        for each in run:
            assert (await ended(client, each.id)).store
            await client.responses.delete(each.id)
        assert (await client.responses.create(**ASK, store=True)).store

    Scripted(PLAIN, *"abcd", max_stored_responses=2).run(use)


async def ended(client: Client, ident: str) -> Any:
    while (response := await client.responses.retrieve(ident)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    return response


@pytest.mark.exhaustive
def test_background_responses_of_the_bundled_pair(tmp_path: Path) -> None:
    """They run on without their client, are cancelled, fail, and count for their key."""
    keys, path = tmp_path / "keys", tmp_path / "responses.sqlite"
    keys.write_text("alice a-key max_requests=1\nbob b-key\n")
    settings = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192}
    more = {"api_key_file": keys, "response_store": path}
    long: Any = {"model": "bundled", "input": QUESTION, "background": True}
    long["extra_body"] = {"ignore_eos": True}
    with LiveServer(*flags(**settings, **more), key="a-key") as server:
        alice = server.client(max_retries=0)
        bob = alice.with_options(api_key="b-key")
        begun = alice.responses.create(**long, max_output_tokens=3000)
        with pytest.raises(openai.RateLimitError, match="1 requests of this API key"):
            alice.responses.create(model="bundled", input="x", max_output_tokens=5)
        with pytest.raises(openai.NotFoundError):
            bob.responses.cancel(begun.id)
        wait_for(lambda: alice.responses.retrieve(begun.id).status == "in_progress", 20)
        assert alice.responses.input_items.list(begun.id).data
        alice.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            alice.responses.retrieve(begun.id)
        server.wait_idle()
        begun = bob.responses.create(**long, max_output_tokens=3000)
        assert bob.responses.cancel(begun.id).status == "cancelled"
        assert bob.responses.retrieve(begun.id).status == "cancelled"
        late = bob.responses.create(
            model="bundled", input=QUESTION, background=True, max_output_tokens=3000,
            extra_body={"ignore_eos": True, "request_timeout": 0.2},
        )  # fmt: skip
        wait_for(lambda: bob.responses.retrieve(late.id).status == "failed", 20)
        error = bob.responses.retrieve(late.id).error
        assert error is not None and "request_timeout" in error.message
        kept = bob.responses.create(model="bundled", input=QUESTION, max_output_tokens=9)
        server.wait_idle()
    with LiveServer(*flags(**settings, **more), key="b-key") as server:  # from the file
        assert server.client().responses.retrieve(kept.id) == kept
        more_ = server.client().responses.create(
            model="bundled", input="And?", max_output_tokens=9, previous_response_id=kept.id
        )
        assert more_.previous_response_id == kept.id


def test_lists_come_in_pages() -> None:
    items: list[Any] = [{"id": str(number)} for number in range(7)]
    got, after = [], None
    while True:
        page = item_page(items, 3, "desc", after)
        got += [item["id"] for item in page["data"]]
        assert page["first_id"] == page["data"][0]["id"]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert got == [item["id"] for item in reversed(items)]
    assert item_page([], 3, "asc", None) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


def test_the_store_holds_its_limits(tmp_path: Path) -> None:
    """Whatever is put into it, and a file has what was there before."""
    path = str(tmp_path / "store.sqlite")

    async def fill(store: ResponseStore) -> int:
        for number in range(60):
            body = {"text": "x" * (number * 37 % 400)}
            await store.put("a", Entry(RESPONSE, f"r{number}", body, [], number % 10 == 0))
        found = 0
        for number in range(60):
            try:
                entry = await store.get("a", RESPONSE, f"r{number}")
            except ApiError as error:
                assert error.status == 404 and number % 10
                continue
            assert len(entry.body["text"]) == number * 37 % 400
            found += 1
        return found

    for where in (None, path):
        store = ResponseStore(where, Limits(20, 4000))
        found = asyncio.run(fill(store))
        assert 6 <= found <= 20
        count, size = store._used("a")
        assert count == found and size <= 4000
        store.close()
    store = ResponseStore(path, Limits(20, 4000))
    assert store._used("a") == (count, size)
    store.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a" / "b", tmp_path / "text"):
        (tmp_path / "text").write_text("no database, but a text that is long enough " * 99)
        with pytest.raises(ConfigError, match="not a file that SQLite can use"):
            ResponseStore(str(path), Limits(1, 1))


@pytest.mark.parametrize("value", ['"\\ud800"', "1" * 4000, "[" * 900 + "]" * 900])
def test_input_that_json_should_not_have_is_refused(value: str) -> None:
    item = f'{{"role": "user", "content": "x", "y": {value}}}'
    body = json.dumps({"model": "bundled", "input": []}).replace("[]", f"[{item}]")
    answer = Scripted(PLAIN, "a").post("/v1/responses", body.encode())
    assert answer.status_code in (200, 400), answer.text
