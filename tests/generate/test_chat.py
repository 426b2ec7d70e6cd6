"""`Chat`: what the state has read after each turn, undo, save and load, templates."""

from pathlib import Path

import pytest
import torch
from commands import CHATML, save_chat_model, save_greeter

from xlstm7b import chat_format
from xlstm7b.chat_format import ChatFormat, ChatTemplate, PlainFormat
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SavedState
from xlstm7b.generate.chat import MAX_UNDO, Chat
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer


def bytes_of(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def answer(chat: Chat, text: str) -> str:
    return "".join(output.text for output in chat.say(text))


def random_generator() -> Generator:
    torch.manual_seed(1)
    model = XLSTM(ModelConfig(64, 2, 2, vocab_size=320))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return Generator(model, ByteTokenizer())


def assert_has_read(chat: Chat, generator: Generator, ids: list[int], path: Path) -> None:
    """The state of the conversation equals that after reading all of these ids at once."""
    chat.save(path)
    got, want = SavedState.load(path, generator.config), generator.read([ids])
    assert got.tokens_seen == want.tokens_seen
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    for mine, other in zip(got.model_state.blocks, want.model_state.blocks, strict=True):
        scale = (mine.m - other.m).exp()
        torch.testing.assert_close(mine.n * scale[..., None], other.n, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.C * scale[..., None, None], other.C, rtol=1e-4, atol=1e-4)


# Plain turns


@pytest.fixture(scope="module")
def greeter(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return Generator.from_pretrained(save_greeter(tmp_path_factory.mktemp("greeter")))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_plain_turns_are_read_once(greeter: Generator, tmp_path: Path, system: str | None) -> None:
    chat = Chat(greeter, system=system, temperature=0)
    text = "" if system is None else "Be brief.\n\n"
    for words in ("Hello", "How are you?", "Grüß dich"):
        assert answer(chat, words) == " Hi!"
        text += f"User: {words}\nAssistant: Hi!\n"
        # The stop string is the start of the next turn: the state has read it.
        assert_has_read(chat, greeter, bytes_of(text + "User:"), tmp_path / "state")
    assert chat.stats().exchanges == 3
    assert chat.stats().tokens_read == 1 + len(bytes_of(text + "User:"))


def test_answers_cut_short_are_closed(greeter: Generator, tmp_path: Path) -> None:
    chat = Chat(greeter, temperature=0, max_new_tokens=2)
    assert answer(chat, "a") == " H"
    assert answer(chat, "b") == " H"
    text = "User: a\nAssistant: H\nUser: b\nAssistant: H"
    assert_has_read(chat, greeter, bytes_of(text), tmp_path / "state")
    chat = Chat(greeter, temperature=0)
    cut = "".join(output.text for output in chat.say("a", should_stop=lambda: True))
    assert cut == " "
    assert answer(chat, "b") == " Hi!"
    text = f"User: a\nAssistant:{cut}\nUser: b\nAssistant: Hi!\nUser:"
    assert_has_read(chat, greeter, bytes_of(text), tmp_path / "state")


def test_a_stop_string_given_by_the_user(greeter: Generator, tmp_path: Path) -> None:
    chat = Chat(greeter, temperature=0, stop_strings=("i",))
    assert answer(chat, "a") == " H"
    assert answer(chat, "b") == " H"
    text = "User: a\nAssistant: Hi\nUser: b\nAssistant: Hi"
    assert_has_read(chat, greeter, bytes_of(text), tmp_path / "state")


def test_an_exchange_counts_only_after_its_last_output(greeter: Generator) -> None:
    chat = Chat(greeter, temperature=0)
    answer(chat, "a")
    before = chat.stats()
    outputs = chat.say("b")
    next(outputs)
    assert chat.stats() == before
    outputs.close()
    assert chat.stats() == before
    with pytest.raises(ValueError, match="top_p must be"):
        Chat(greeter, top_p=2)


def test_undo_and_clear() -> None:
    chat = Chat(random_generator(), max_new_tokens=6, seed=3)
    first, second = answer(chat, "one"), answer(chat, "two")
    chat.undo()
    assert (chat.stats().exchanges, answer(chat, "two")) == (1, second)
    chat.undo()
    other = answer(chat, "three")
    chat.undo()
    chat.undo()
    assert (chat.stats().tokens_read, answer(chat, "one")) == (0, first)
    assert answer(chat, "three") == other
    chat.clear()
    assert chat.stats() == (0, 0, 0, None)
    assert answer(chat, "one") == first
    chat.clear()
    with pytest.raises(
        ValueError, match=r"^there is nothing to undo \(at most 8 exchanges are kept\)$"
    ):
        chat.undo()
    for _ in range(MAX_UNDO + 2):
        answer(chat, "again")
    for _ in range(MAX_UNDO):
        chat.undo()
    assert chat.stats().exchanges == 2
    with pytest.raises(ValueError, match="there is nothing to undo"):
        chat.undo()


def test_a_seed_makes_the_whole_conversation_reproducible() -> None:
    generator = random_generator()

    def talk(**sampling: int) -> list[str]:
        chat = Chat(generator, max_new_tokens=12, **sampling)
        return [answer(chat, word) for word in ("a", "b")]

    assert talk(seed=3) == talk(seed=3) != talk(seed=4)
    assert talk(seed=(1 << 64) - 1) == talk(seed=(1 << 64) - 1)


@pytest.mark.parametrize("sampling", [{}, {"stop_strings": ("a", "e", "i", "o", "u")}])
def test_save_and_load(tmp_path: Path, sampling: dict[str, tuple[str, ...]]) -> None:
    generator, path = random_generator(), tmp_path / "state"
    chat = Chat(generator, max_new_tokens=40, temperature=0, **sampling)
    with pytest.raises(ValueError, match=r"^there is nothing to save: the conversation is empty$"):
        chat.save(path)
    answer(chat, "one")
    chat.save(path)
    want = [answer(chat, "two"), answer(chat, "three")]
    later = Chat(random_generator(), max_new_tokens=40, temperature=0, **sampling)
    answer(later, "something else")
    later.load(path)
    assert [answer(later, "two"), answer(later, "three")] == want
    later.undo()
    later.undo()
    with pytest.raises(ValueError, match="nothing to undo"):
        later.undo()
    assert answer(later, "two") == want[0]


def test_a_stop_string_that_was_read_is_saved_too(greeter: Generator, tmp_path: Path) -> None:
    path = tmp_path / "state"
    chat = Chat(greeter, temperature=0)
    answer(chat, "a")
    chat.save(path)
    chat = Chat(greeter, temperature=0)
    chat.load(path)
    answer(chat, "b")
    text = "User: a\nAssistant: Hi!\nUser: b\nAssistant: Hi!\nUser:"
    assert_has_read(chat, greeter, bytes_of(text), path)


def test_load_any_text(greeter: Generator, tmp_path: Path) -> None:
    path = tmp_path / "state"
    greeter.read("A long book.").save(path)
    chat = Chat(greeter, temperature=0)
    chat.load(path)
    answer(chat, "What of it?")
    text = "A long book.\nUser: What of it?\nAssistant: Hi!\nUser:"
    assert_has_read(chat, greeter, bytes_of(text), path)
    greeter.read(["a", "b"]).save(path)
    before = chat.stats()
    with pytest.raises(ValueError, match=r"holds the states of 2 texts; one is needed$"):
        chat.load(path)
    with pytest.raises(ValueError, match="there is no file"):
        chat.load(tmp_path / "none")
    assert chat.stats() == before


def test_the_system_message_comes_after_a_text_and_once(greeter: Generator, tmp_path: Path) -> None:
    path = tmp_path / "state"
    greeter.read("A long book.").save(path)
    chat = Chat(greeter, system="Be brief.", temperature=0)
    chat.load(path)
    chat.save(path)  # no message has been read yet
    chat.load(path)
    answer(chat, "a")
    text = "A long book.\nBe brief.\n\nUser: a\nAssistant: Hi!\nUser:"
    assert_has_read(chat, greeter, bytes_of(text), path)
    chat.load(path)
    answer(chat, "b")
    assert_has_read(chat, greeter, bytes_of(text + " b\nAssistant: Hi!\nUser:"), path)


def test_a_saved_conversation_keeps_its_count(tmp_path: Path) -> None:
    path = tmp_path / "state"
    chat = Chat(random_generator(), max_new_tokens=12, seed=3)
    for word in ("a", "b"):
        answer(chat, word)
    chat.save(path)
    later = Chat(random_generator(), max_new_tokens=12, seed=3)
    later.load(path)
    assert later.stats().exchanges == 2
    assert answer(later, "c") == answer(chat, "c")
    assert later.stats().exchanges == 3


def test_a_state_saved_by_the_server_is_a_conversation(greeter: Generator, tmp_path: Path) -> None:
    """Its note is what the model read after the answer; it has no count of exchanges."""
    path = tmp_path / "state"
    for overread in ("", "\nUser:"):
        greeter.read(f"User: a\nAssistant: Hi!{overread}").save(path, note=overread)
        chat = Chat(greeter, system="Be brief.", temperature=0)
        chat.load(path)
        answer(chat, "b")
        text = "User: a\nAssistant: Hi!\nUser: b\nAssistant: Hi!\nUser:"
        assert_has_read(chat, greeter, bytes_of(text), path)
        assert chat.stats().exchanges == 1


# Templates


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return Generator.from_pretrained(save_chat_model(tmp_path_factory.mktemp("templated")))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_template_turns_are_read_once(
    templated: Generator, tmp_path: Path, system: str | None
) -> None:
    template = ChatTemplate(CHATML, {})
    turns = ChatFormat(template, system)
    assert turns.stop_string == "<|im_end|>"
    chat = Chat(templated, turns, system=system, max_new_tokens=50)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for words in ("Hello", " How are you? ", "Grüß dich"):
        assert answer(chat, words) == "Hi!"
        messages += [
            {"role": "user", "content": words},
            {"role": "assistant", "content": "Hi!"},
        ]
        whole = template.render(messages).removesuffix("<|im_end|>\n")
        ids = templated.tokenizer.encode(whole)
        assert_has_read(chat, templated, ids, tmp_path / "state")


def test_a_template_conversation_after_a_text_closes_no_turn(
    templated: Generator, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    templated.read("A long book.").save(path)
    template = ChatTemplate(CHATML, {})
    chat = Chat(templated, ChatFormat(template, "Be brief."), system="Be brief.")
    chat.load(path)
    assert answer(chat, "Hello") == "Hi!"
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    whole = template.render(opening, add_generation_prompt=True)
    ids = templated.tokenizer.encode("A long book.") + templated.tokenizer.encode(f"\n{whole}")
    assert_has_read(chat, templated, ids + templated.tokenizer.encode("Hi!"), path)


@pytest.mark.parametrize(("ending", "answered", "overread"), [("!", " Hi", ""), ("i!", " H", "i!")])
def test_an_ending_in_plain_text(
    greeter: Generator, tmp_path: Path, ending: str, answered: str, overread: str
) -> None:
    """An ending of one token is not read. A longer one is a stop string, which is read."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}>bot:"
        "{% else %}{{ m.content }}" + ending + "\n{% endif %}{% endfor %}"
    )
    turns = ChatFormat(ChatTemplate(source, {}))
    assert turns.stop_string == ending
    chat = Chat(greeter, turns, temperature=0)
    assert [answer(chat, "a"), answer(chat, "b")] == [answered, answered]
    text = "<a>bot: Hi!\n<b>bot:" + answered + overread
    assert_has_read(chat, greeter, bytes_of(text), tmp_path / "state")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[-1].content }}",  # only the last
        "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}",  # numbered
        "{{ messages | length }}{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:",  # another start
        "a constant",
    ],
)
def test_templates_that_do_not_add_turn_by_turn(source: str) -> None:
    with pytest.raises(ValueError, match=r"^the chat template does not just add to a text"):
        ChatFormat(ChatTemplate(source, {}))


def test_a_template_without_system_messages() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        + CHATML
    )
    assert ChatFormat(ChatTemplate(source, {})).stop_string == "<|im_end|>"
    with pytest.raises(ValueError, match=r"^the chat template fails: no system here$"):
        ChatFormat(ChatTemplate(source, {}), "Be brief.")


def test_a_message_may_contain_the_mark_of_an_answer() -> None:
    turns = ChatFormat(ChatTemplate(CHATML, {}))
    words = chat_format.ANSWER
    assert turns.next_prompt(words) == (
        f"<|im_end|>\n<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert PlainFormat().next_prompt(words) == f"\nUser: {words}\nAssistant:"


@pytest.mark.parametrize("turns", [PlainFormat(), ChatFormat(ChatTemplate(CHATML, {}))])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_whole_conversation_is_its_turns(turns: ChatFormat, system: str | None) -> None:
    """The server renders at once what `Chat` reads turn by turn."""
    said = [{"role": "user", "content": "Hello"}]
    if system is not None:
        said.insert(0, {"role": "system", "content": system})
    start = turns.first_prompt(system, "Hello")
    assert turns.render(said) == start
    answer = " Hi!" if isinstance(turns, PlainFormat) else "Hi!"
    said += [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Go on."}]
    assert turns.render(said) == start + answer + turns.next_prompt("Go on.")
    closed = turns.render(said[:-1], add_generation_prompt=False)
    assert closed.rstrip() == start + answer + turns.stop_string.removesuffix("\nUser:")
