"""The benchmark's random words."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.evaluate.ruler import words


def test_the_words_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = words.keys()
    assert len(keys) == 910 * 6786
    assert keys[0] < keys[1] < keys[len(keys) - 1]
    for number in range(0, len(keys) - 1, 997):  # two keys that are equal would be out of order
        assert keys[number] < keys[number + 1]
    assert len(words.shuffled_words(42)) == len(set(words.shuffled_words(42))) == 8169
    assert words.shuffled_words(42) != words.shuffled_words(43)
    for installed in ("3.0.1", None):

        def version(name: str, installed: str | None = installed) -> SimpleNamespace:
            if installed is None:
                raise words.PackageNotFoundError(name)
            return SimpleNamespace(version=installed)

        monkeypatch.setattr(words, "distribution", version)
        with pytest.raises(ValueError, match=r"pip install wonderwords==2\.2\.0"):
            words.shuffled_words(42)


@given(
    st.lists(st.text("ab-", min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_keys_are_sorted_without_a_list(adjectives: list[str], nouns: list[str]) -> None:
    keys = words.Keys(adjectives, nouns)
    assert [*keys] == sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    assert len(keys) == len({*adjectives}) * len({*nouns})
