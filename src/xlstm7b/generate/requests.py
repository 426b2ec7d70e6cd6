"""What is asked for: a text to continue, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from xlstm7b.generate.sampling import SamplingSettings

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Request:
    """One text to continue, a string or ids. Without `eos_token_id`, the model's is it.

    `already_read` are ids that a given state has read, and `already_generated` those that were
    generated behind them: penalties then see the whole text.
    """

    prompt: Prompt
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    stop_strings: tuple[str, ...] = ()
    already_read: tuple[int, ...] = ()
    already_generated: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The prompt, once it was turned into ids."""
        assert isinstance(self.prompt, list)
        return self.prompt

    def once_read(self) -> Self:
        """What is left to ask for when a state has read the prompt."""
        return replace(self, prompt=[], already_read=(*self.already_read, *self.ids))

    def nth(self, n: int) -> Self:
        """The n-th of several like it: a seed s becomes s + n."""
        if self.settings.seed is None:
            return self
        seed = (self.settings.seed + n) % (1 << 64)
        return replace(self, settings=replace(self.settings, seed=seed))


def common_requests(
    prompts: str | Sequence[Prompt], stop_strings: str | Sequence[str], settings: dict[str, Any]
) -> list[Request]:
    """Prompts under one set of settings, given by name as in `Generator.generate`."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not prompts:
        raise ValueError("there are no prompts")
    for prompt in prompts:
        if isinstance(prompt, int) or not (
            isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
        ):
            raise ValueError("prompts must be a list of strings or of lists of ids")
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    chosen = _settings(dict(settings))
    return [Request(prompt, chosen, stops) for prompt in prompts]


def _settings(given: dict[str, Any]) -> SamplingSettings:
    do_sample = given.pop("do_sample", None)
    if do_sample is not None:
        given.setdefault("temperature", 1.0 if do_sample else 0.0)
    known = [known.name for known in fields(SamplingSettings)]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no setting {name!r}; there are: {', '.join(known)}")
    settings = SamplingSettings(**given)
    if do_sample is not None and do_sample != (settings.temperature > 0):
        raise ValueError(f"do_sample={do_sample} contradicts temperature {settings.temperature}")
    return settings
