"""How much text fits into a prompt."""

from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from ruler_cases import ESSAY, build, builder, count_bpe, count_bytes

from xlstm7b.evaluate.ruler.datasets import Datasets, Question, Questions
from xlstm7b.evaluate.ruler.samples import Builder
from xlstm7b.evaluate.ruler.tasks import TASKS

tasks = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 2**32 - 1)
counters = st.sampled_from([count_bytes, count_bpe()])


@given(tasks, st.integers(1, 12000), seeds, counters)
@settings(max_examples=60, deadline=None)
def test_prompts_fit_or_are_refused(
    name: str, length: int, seed: int, count: Callable[[str], int]
) -> None:
    samples, refused = [], f"a length of {length} is too short for {name}: "
    try:
        builder(name, length, seed, count).check(2)
        samples = build(name, 2, length, seed, count)
    except ValueError as error:
        if not str(error).startswith(refused) or " and -" in str(error):  # no negative room
            raise
    assert samples or length < 8192
    for sample in samples:
        tokens = count(sample.prompt) + TASKS[name].answer_tokens
        if name == "vt":  # the names of the example change after the count
            assert abs(sample.length - tokens) < 60
        else:
            assert sample.length == tokens
        assert sample.length <= length + (50 if name == "fwe" else 0)


def naive_growth(built: Builder) -> int:
    """The published search: the tokens of every prompt are counted."""
    size, tokens, room = built.step, 0, built.limit - built.answer_tokens - built.example_tokens
    while tokens < room:
        draft = built.draw(size, 0)
        tokens = built.setting.count_tokens(draft.render() + draft.answer)
        if tokens > room:
            return max(size - built.step, built.step)
        if built.last_drawn > built.largest and size > built.largest:
            return built.largest
        size += built.step
        if built.last_drawn == built.largest and size > built.largest:
            return built.largest
    return size


@given(tasks.filter(lambda name: name != "fwe"), st.integers(4096, 16000), seeds, counters)
@settings(max_examples=30, deadline=None)
def test_sizes_are_found_as_published(
    name: str, length: int, seed: int, count: Callable[[str], int]
) -> None:
    fast, slow = (builder(name, length, seed, count, more_data()) for _ in range(2))
    assert fast.find_size() == naive_growth(slow)
    assert fast.rng.getstate() == slow.rng.getstate()
    assert str(fast.numpy.get_state()) == str(slow.numpy.get_state())


def more_data() -> Datasets:
    """Enough documents, of very different lengths, for the longest prompts of a test."""
    rng = Random(7)
    documents = sorted("fact " * rng.randint(2, 90) + str(number) for number in range(400))
    asked = [Question("Why?", ("fact",), (n,), tuple(range(n + 1, n + 39))) for n in range(40)]
    hops = [Question("Who?", ("fact",), tuple(range(n, n + 10))) for n in range(40)]
    haystack = ESSAY.split(" ") * 3
    return Datasets(haystack, Questions(asked, documents), Questions(hops, documents))


def test_very_long_prompts_are_tokenized_few_times() -> None:
    """Counting them takes half a second. The published search does it 800 times."""
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "cwe", "fwe", "qa_1"):
        counted = []

        def count(text: str, counted: list[int] = counted) -> int:
            counted.append(len(text) // 4)
            return counted[-1]

        samples = builder(name, 1 << 16, count=count, data=more_data()).samples()
        first = next(samples)
        assert first.length <= (1 << 16) + 50
        if name not in ("niah_single_2", "qa_1"):  # the data of this test is too short for them
            assert first.length >= 0.95 * (1 << 16)
        assert len(counted) <= 40, name
        counted.clear()
        next(samples)
        assert len(counted) <= 3


def test_a_step_that_fits_exactly_is_one_too_far() -> None:
    """After a prompt of exactly that length the benchmark goes on, then draws a smaller one."""
    (first,) = build("niah_single_1", 1, 4096)
    exact = first.length
    fast, slow = (builder("niah_single_1", exact) for _ in range(2))
    assert fast.find_size() == naive_growth(slow)
    assert build("niah_single_1", 1, exact)[0].length <= exact
